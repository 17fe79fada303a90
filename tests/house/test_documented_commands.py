"""Each command that the documents and the help show is parsed, with names that exist; at night it runs, see
test_running_commands.py."""

from __future__ import annotations

import configparser
import re
import shlex
from fnmatch import fnmatch
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from fsdpcheck import adapters, cli, pytest_plugin
from fsdpcheck.cli import launch, replay
from fsdpcheck.findings import tokens
from fsdpcheck.judging import registry
from tests.common import documents
from tests.common.documents import EXAMPLES, ROOT

pytestmark = pytest.mark.skipif(not documents.DOCUMENTS[0].is_file(), reason="only a checkout has the documents")

PLACES = {"train.py", "report.json", "night.json", "monday.json", "power.json", "trace.json", "dumps"}
"""Files that the reader is meant to have: a model, and reports, measurements, traces and dumps of commands before."""


def _of_fsdpcheck(words: list[str]) -> None:
    options = vars(cli._parser().parse_args(words))
    named = options.get("adapter") or ()
    refs = [ref for ref in ([named] if isinstance(named, str) else named) if isinstance(ref, str)]
    for ref in refs:
        if adapters.is_builtin(ref) and not ref.startswith("opacus"):
            adapters.load(ref)
        else:
            assert adapters.is_builtin(ref) or _file(ref), ref
    for name in ("model", "batch", "loss"):
        assert not options.get(name) or _file(options[name]), options[name]
    globs = [*(options.get("law") or ()), *([options["globs"]] if options.get("globs") else [])]
    for glob in ",".join(globs).split(",") if globs else ():
        assert any(fnmatch(known, glob) for known in registry.chapters()), glob
    if line := options.get("line"):
        assert _file(f"{shlex.split(line)[0]}:"), line
    for path in options.get("paths") or [*filter(None, [options.get("file")])]:
        assert str(path) in PLACES
    for path in [*options.get("reports", ()), *filter(None, [options.get("power")])]:
        assert re.sub(r"part\d\.seed\d", "report", str(path)) in PLACES
    if what := options.get("command") is replay.replay_command and options["what"]:
        assert tokens.looks_like_token(str(what)) or what in PLACES


def _file(ref: str) -> bool:
    name = ref.rpartition(":")[0]
    return name in PLACES or (ROOT / name).is_file()


def _of_torchrun(words: list[str]) -> None:
    options = get_args_parser().parse_args(words)
    assert (options.module, options.training_script) == (True, "fsdpcheck")
    _of_fsdpcheck(launch.asked(options.training_script_args))


def _of_pytest(words: list[str]) -> None:
    class Group:
        def __init__(self) -> None:
            self.names: list[str] = []

        def addoption(self, name: str, **_: Any) -> None:
            self.names.append(name)

    group = Group()
    parser = {"getgroup": lambda self, *_: group, "addini": lambda self, *_, **__: None}
    pytest_plugin.pytest_addoption(type("Parser", (), parser)())  # type: ignore[arg-type]
    for word in words:
        if word.startswith("--fsdpcheck"):
            assert word in group.names
        elif word.endswith(".py"):
            assert (ROOT / word).is_file()


def _of_python(words: list[str]) -> None:
    if words[:2] == ["-m", "tox"]:
        tox = configparser.ConfigParser()
        tox.read(ROOT / "tox.ini")
        assert words[2:4] == ["run", "-e"]
        assert words[4] == tox["tox"]["env_list"] or f"testenv:{words[4]}" in tox
    else:
        assert words in (["-m", "pip", "install", "tox"], ["-m", "pip", "install", "."])


KNOWN = {"fsdpcheck": _of_fsdpcheck, "torchrun": _of_torchrun, "pytest": _of_pytest, "python3": _of_python}


def test_every_command_that_is_shown_is_parsed_and_names_what_exists() -> None:
    shown = documents.commands()
    assert {where for where, _ in shown} == {
        "README.md",
        "fifteen-minutes.md",
        "gate.md",
        "ci.md",
        "reports.md",
        "own-tests.md",
        "faults.md",
        "shards.md",
        "user-models.md",
        "verdicts.md",
        "only-a-script.md",
        "simulate.md",
        "compare.md",
        "cost.md",
        "torchrun.md",
        "gpus.md",
        "laws.md",
        "traces.md",
        "findings-before-and-after.md",
        "help",
    }
    assert len(shown) > 30
    for where, line in shown:
        for program, *words in documents.parts(line):
            if program == "pip":
                assert words[:1] == ["install"]
                continue
            try:
                KNOWN[program](words)
            except (SystemExit, AssertionError, KeyError) as error:
                if "--help" not in words:
                    pytest.fail(f"{where}: {line!r}: {error!r}")


def test_every_command_of_an_example_is_one_that_there_is() -> None:
    shown = documents.of_examples()
    assert {folder for folder, _ in shown} == {"char_transformer", "private_finetuning"}
    for folder, line in shown:
        for program, *words in documents.parts(line):
            assert program == "fsdpcheck", line
            options = vars(cli._parser().parse_args(words))
            script = options.get("line") or options.get("script") or "train.py"
            assert (EXAMPLES / folder / shlex.split(str(script))[0]).is_file(), line


def test_what_is_no_command_is_noticed() -> None:
    for words in (["run", "--adapters", "x"], ["run", "--law", "nrms.*"], ["run", "--adapter", "refrence"], ["replya"]):
        with pytest.raises((SystemExit, AssertionError)):
            _of_fsdpcheck(words)
    with pytest.raises(AssertionError):
        _of_pytest(["--fsdpcheck-adaptor"])


def test_every_study_that_is_named_is_one_of_the_benchmarks() -> None:
    studies = pytest.importorskip("benchmarks.__main__").STUDIES
    sources = [*documents.DOCUMENTS, *(ROOT / "docs").glob("*/**/*.md"), *ROOT.glob("[bfipt]*/**/*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    named = [(path, name) for path, text in texts.items() for name in re.findall(r"-m benchmarks ([a-z][a-z-]+)", text)]
    assert len(named) > 40
    assert [(path.relative_to(ROOT), name) for path, name in named if name not in studies] == []
