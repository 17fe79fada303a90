"""Each command that the documents and the help show: by day it is parsed, with names that exist, at night it runs."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from fsdpcheck import adapters, cli, pytest_plugin
from fsdpcheck.case import BatchLayout, LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.cli import launch, listing, preflight, replay, run
from fsdpcheck.findings import tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import registry
from fsdpcheck.report import document
from tests.common import commands, sessions
from tests.common.commands import environment

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = ROOT / "docs" / "examples"
"""Each repository in it has commands of its own, which run in its folder."""

pytestmark = pytest.mark.skipif(not DOCUMENTS[0].is_file(), reason="only a checkout has the documents")

PLACES = {"train.py", "report.json", "night.json", "monday.json", "power.json", "trace.json", "dumps"}
"""Files that the reader is meant to have: a model, and reports, measurements, traces and dumps of commands before."""


def _fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _shown() -> list[tuple[str, str]]:
    """(where it stands, command line) of all that documents show in blocks, and of the examples of the help."""
    found = []
    for path in DOCUMENTS:
        for block in _fenced(path.read_text(encoding="utf-8"), "console"):
            found += [(path.name, line.removeprefix("$ ")) for line in block.splitlines() if line.startswith("$ ")]
    for text in (run.EPILOG, preflight._EPILOG, replay.EPILOG, listing._EPILOG, cli._WORDLESS):
        lines = [line.strip() for line in text.splitlines() if re.match(r"  (fsdpcheck|torchrun) ", line)]
        found += [("help", re.split(r"\s{2,}", line)[0]) for line in lines]
    return found


def _of_examples() -> list[tuple[str, str]]:
    """(folder, command line) of what the repositories of docs/examples show."""
    return [
        (path.parent.name, line.removeprefix("$ "))
        for path in sorted(EXAMPLES.glob("*/README.md"))
        for block in _fenced(path.read_text(encoding="utf-8"), "console")
        for line in block.splitlines()
    ]


def _parts(line: str) -> Iterator[list[str]]:
    """The commands of a line, each in words, without its comment."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word == "&&":
            yield words
            words = []
        else:
            words.append(word)


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
    shown = _shown()
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
        "help",
    }
    assert len(shown) > 30
    for where, line in shown:
        for program, *words in _parts(line):
            if program == "pip":
                continue
            try:
                KNOWN[program](words)
            except (SystemExit, AssertionError, KeyError) as error:
                if "--help" not in words:
                    pytest.fail(f"{where}: {line!r}: {error!r}")


def test_every_command_of_an_example_is_one_that_there_is() -> None:
    shown = _of_examples()
    assert {folder for folder, _ in shown} == {"char_transformer", "private_finetuning"}
    for folder, line in shown:
        for program, *words in _parts(line):
            assert program == "fsdpcheck", line
            options = vars(cli._parser().parse_args(words))
            script = options.get("line") or options.get("script") or "train.py"
            assert (EXAMPLES / folder / shlex.split(str(script))[0]).is_file(), line


@pytest.mark.nightly
@pytest.mark.parametrize(("folder", "line"), _of_examples())
def test_every_command_of_an_example_runs_in_its_folder(folder: str, line: str, tmp_path: Path) -> None:
    if folder == "private_finetuning":
        pytest.importorskip("opacus")
    made = Path(shutil.copytree(EXAMPLES / folder, tmp_path / folder))
    for words in _parts(line):
        start = [sys.executable, "-m", *words]
        done = subprocess.run(start, cwd=made, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout[-3000:], done.stderr[-3000:])


def test_what_is_no_command_is_noticed() -> None:
    for words in (["run", "--adapters", "x"], ["run", "--law", "nrms.*"], ["run", "--adapter", "refrence"], ["replya"]):
        with pytest.raises((SystemExit, AssertionError)):
            _of_fsdpcheck(words)
    with pytest.raises(AssertionError):
        _of_pytest(["--fsdpcheck-adaptor"])


OF_TRAINING = """

from own_checkpoints import load, save
from own_parts import ddp as parallelize, fully_shard, step
from own_privacy import private


def shard(model, mesh):
    return fully_shard(model, mesh=mesh)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.5)
"""
"""What a training script has besides its model: functions that are right."""
NARROW = {"run": ["--law", "training.plain", "--world-size", "1-2", "--profile", "quick"]}
"""What is put behind a command that would take hours, so that it takes seconds. It still runs whole otherwise."""


@pytest.fixture
def folder(tmp_path: Path, supposed: Path) -> Path:
    """A copy of it, for what one command writes is not what the next is shown with."""
    return Path(shutil.copytree(supposed, tmp_path / "reader"))


@pytest.fixture(scope="module")
def supposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the documents suppose it: the examples, a model, a report with a token."""
    made = tmp_path_factory.mktemp("reader")
    gpt = (ROOT / "docs" / "examples" / "small_gpt.py").read_text(encoding="utf-8")
    (made / "train.py").write_text(gpt + OF_TRAINING, encoding="utf-8")
    for name in ("own_parts.py", "own_checkpoints.py", "own_privacy.py"):
        shutil.copy(commands.TOYS / name, made)
    shutil.copytree(ROOT / "docs" / "examples", made / "docs" / "examples")
    broken = sessions.finding(adapter="reference", token=_token())
    told = sessions.ledger(
        [Verdict("training.plain", "reference", "finding", 1, finding=broken, exit_code=1)], ["reference"]
    )
    for name in ("report.json", "monday.json"):
        (made / name).write_text(json.dumps(document.document(told)))
    (made / "power.json").write_text("{}")
    traces = ["--trace", "trace.json", "--dumps", "dumps", "docs/examples/sharded_step.py"]
    assert commands.run(made, "simulate", "-n", "2", *traces)[0] == 0
    return made


def _token() -> str:
    case = TrainingCase(model=ModelSpec(layers=(LayerSpec(width=2),)), layout=BatchLayout(batch_size=2))
    return tokens.encode(tokens.Token("training.plain", "reference", case))


def _runs() -> list[tuple[str, ...]]:
    """Those that a reader can run as they stand, and that no other test runs: without pip, tox and this very suite."""
    found = {tuple(words) for _, line in _shown() for words in _parts(line) if words[0] in ("fsdpcheck", "torchrun")}
    return sorted(words for words in found if "train.py:MyAdapter" not in words and words[-1] != "pkg.mod:attr")


@pytest.mark.nightly
@pytest.mark.parametrize("words", _runs(), ids=" ".join)
def test_every_command_that_is_shown_runs_whole(words: tuple[str, ...], folder: Path) -> None:
    if any(word.startswith("opacus") for word in words):
        pytest.importorskip("opacus")
    if any("gpt2.py" in word for word in words):
        pytest.importorskip("transformers")
    if "cuda" in words and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if "run" in words and "--law" not in words:
        law_and_ranks = NARROW["run"] if words[0] == "fsdpcheck" else NARROW["run"][:2]
        if "--real" in words:
            law_and_ranks = ["--law", "rounding.gradients", *law_and_ranks[2:]]
        if "--private" in words or any(
            word.startswith("opacus") for word in words
        ):  # it clips every step: it promises no plain training
            law_and_ranks = ["--law", "clipping.norms", *law_and_ranks[2:]]
        words = (*words, *law_and_ranks)
    words = tuple(_token() if word.startswith("v2:") else word for word in words)
    start = [sys.executable, "-m", *(["fsdpcheck"] if words[0] == "fsdpcheck" else ["torch.distributed.run"])]
    if "merge" in words:  # shards have been written, of which each has several blocks
        part = ["run", "--adapter", "ddp", *NARROW["run"], "--blocks", "2", "--json", "part3.json"]
        assert commands.run(folder, *part)[0] == 0
    if "gate" in words:
        words = (*words, "--adapter", "ddp", *NARROW["run"][: 4 if words[0] == "fsdpcheck" else 2])
        if "--update" not in words:  # a gate has a baseline
            written = subprocess.run(
                [*start, *words[1:], "--update"], cwd=folder, env=environment(), capture_output=True
            )
            assert written.returncode == 0
    done = subprocess.run([*start, *words[1:]], cwd=folder, env=environment(), capture_output=True, text=True)
    breaks = "skips_empty.py" in " ".join(words) or (words[1] == "compare" and "--all-tokens" not in words[2])
    wanted = 1 if breaks else 0
    assert done.returncode == wanted, (words, done.stdout[-3000:], done.stderr[-3000:])
