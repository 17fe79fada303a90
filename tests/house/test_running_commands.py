"""Each command that the documents and the help show runs, where they suppose it does; what is long is narrowed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

from fsdpcheck.case import BatchLayout, LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.findings import tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report import document
from tests.common import commands, documents, sessions, wheels
from tests.common.commands import environment
from tests.common.documents import EXAMPLES, ROOT

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not documents.DOCUMENTS[0].is_file(), reason="only a checkout has the documents"),
]

OF_TRAINING: Final = """

from own_checkpoints import load, save
from own_parts import ddp as parallelize, fully_shard, step
from own_privacy import private
from data_parallel import adapter as MyAdapter


def shard(model, mesh):
    return fully_shard(model, mesh=mesh)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.5)
"""
"""What a training script has besides its model: functions that are right, and an adapter."""
FEW: Final = ("--law", "training.plain")
NARROW: Final = (*FEW, "--world-size", "1-2", "--profile", "quick")
"""What is put behind a command that would take hours, so that it takes seconds. It still runs whole otherwise."""


RECORDS: Final = {"findings-before-and-after.md"}
"""What commands printed at commits that are named there; made again by a study of the benchmarks."""


def _each(program: tuple[str, ...]) -> list[tuple[str, ...]]:
    lines = [line for where, line in documents.commands() if where not in RECORDS]
    shown = {tuple(words) for line in lines for words in documents.parts(line)}
    return sorted(words for words in shown if words[: len(program)] == program)


def test_no_command_that_is_shown_is_left_out() -> None:
    programs = [(name,) for name in ("fsdpcheck", "torchrun", "pytest", "pip")]
    programs += [("python3", "-m", name) for name in ("pip", "tox")]
    run = [words for program in programs for words in _each(program)]
    assert (len(run), len({*run})) == (len(_each(())),) * 2


@pytest.fixture
def folder(tmp_path: Path, supposed: Path) -> Path:
    """A copy of it, for what one command writes is not what the next is shown with."""
    return Path(shutil.copytree(supposed, tmp_path / "reader"))


@pytest.fixture(scope="module")
def supposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the documents suppose it: the examples, a model, tests, a report with a token, a baseline."""
    made = tmp_path_factory.mktemp("reader")
    gpt = (EXAMPLES / "small_gpt.py").read_text(encoding="utf-8")
    (made / "train.py").write_text(gpt + OF_TRAINING, encoding="utf-8")
    for name in ("own_parts.py", "own_checkpoints.py", "own_privacy.py"):
        shutil.copy(commands.TOYS / name, made)
    shutil.copy(EXAMPLES / "data_parallel.py", made)
    shutil.copytree(EXAMPLES, made / "docs" / "examples")
    for name, source in _own_tests():
        (made / name).write_text(source, encoding="utf-8")
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


def _own_tests() -> Iterator[tuple[str, str]]:
    """(file, source) of the tests that documents show whole: their first line is a comment that names the file."""
    for name in ("own-tests.md", "simulate.md"):
        for block in documents.blocks((ROOT / "docs" / name).read_text(encoding="utf-8"), "python"):
            if named := re.match(r"# (test_\w+\.py)\n", block):
                yield named[1], block


def _token() -> str:
    case = TrainingCase(model=ModelSpec(layers=(LayerSpec(width=2),)), layout=BatchLayout(batch_size=2))
    return tokens.encode(tokens.Token("training.plain", "reference", case))


@pytest.mark.parametrize("words", [*_each(("fsdpcheck",)), *_each(("torchrun",))], ids=" ".join)
def test_a_command_of_fsdpcheck(words: tuple[str, ...], folder: Path) -> None:
    _require_installed(words)
    breaks = "skips_empty.py" in " ".join(words)
    breaks |= words[1] == "compare" and "--all-tokens" not in words[2]
    words = tuple(_token() if word.startswith("v2:") else word for word in _narrowed(words))
    start = [sys.executable, "-m", *(["fsdpcheck"] if words[0] == "fsdpcheck" else ["torch.distributed.run"])]
    if "merge" in words:  # shards have been written, of which each has several blocks
        part = ["run", "--adapter", "ddp", *NARROW, "--blocks", "2", "--json", "part3.json"]
        assert commands.run(folder, *part)[0] == 0
    if "gate" in words:
        words = (*words, "--adapter", "ddp", *(NARROW[:4] if words[0] == "fsdpcheck" else FEW))
        if "--update" not in words:  # a gate has a baseline
            written = subprocess.run(
                [*start, *words[1:], "--update"], cwd=folder, env=environment(), capture_output=True
            )
            assert written.returncode == 0
    done = subprocess.run([*start, *words[1:]], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == int(breaks), (words, done.stdout[-3000:], done.stderr[-3000:])


def _require_installed(words: tuple[str, ...]) -> None:
    if any(word.startswith("opacus") for word in words):
        pytest.importorskip("opacus")
    if any("gpt2.py" in word for word in words):
        pytest.importorskip("transformers")
    if "cuda" in words and not torch.cuda.is_available():
        pytest.skip("no GPU")


def _narrowed(words: tuple[str, ...]) -> tuple[str, ...]:
    """With a law that the adapter promises, where none is named."""
    if "run" not in words or "--law" in words:
        return words
    law = "training.plain"
    if "--real" in words:
        law = "rounding.gradients"
    elif "--private" in words or any(word.startswith("opacus") for word in words):
        law = "clipping.norms"  # it clips every step: it promises no plain training
    return (*words, "--law", law, *(NARROW[2:] if words[0] == "fsdpcheck" else ()))


@pytest.mark.parametrize("words", _each(("pytest",)), ids=" ".join)
def test_a_command_of_pytest(words: tuple[str, ...], folder: Path) -> None:
    """Those of this suite run in the checkout, one file of it; the others where tests are that documents show."""
    if "test_example_models.py" in " ".join(words):
        pytest.importorskip("transformers")
    of_suite = "not nightly" in words or any(word.startswith("tests/") for word in words)
    narrow = (
        ["tests/case/test_traits.py"]
        if "not nightly" in words
        else ["-k", "training.plain"]
        if "--pyargs" in words
        else []
    )
    if "--fsdpcheck-baseline" in words:
        written = ("gate", "--adapter", "train.py:MyAdapter", *NARROW, "--no-confirm", "--update")
        assert commands.run(folder, *written)[0] == 0
    start = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words[1:], *narrow]
    done = subprocess.run(start, cwd=ROOT if of_suite else folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one."""
    made = tmp_path_factory.mktemp("checkout")
    wheels.copy(made, "tests", "conftest.py", "tox.ini", "constraints.txt", "docs")
    return made


@pytest.mark.parametrize("words", [*_each(("pip",)), *_each(("python3", "-m", "pip"))], ids=" ".join)
def test_a_command_of_pip(words: tuple[str, ...], checkout: Path, tmp_path: Path) -> None:
    """It installs what it names, into a folder, without what that needs in turn, which is there."""
    named = words[words.index("install") + 1 :]
    start = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), *named]
    start += ["--no-build-isolation"] if named == (".",) else []
    done = subprocess.run(start, cwd=checkout, capture_output=True, text=True)
    assert (done.returncode, any(tmp_path.iterdir())) == (0, True), done.stderr


@pytest.mark.parametrize("words", _each(("python3", "-m", "tox")), ids=" ".join)
def test_a_command_of_tox(words: tuple[str, ...], checkout: Path) -> None:
    """In an environment that it makes, with one law or one file of the tests."""
    pytest.importorskip("tox")
    narrow = ["--adapter", "ddp", *NARROW] if words[-1] == "check" else ["tests/case/test_traits.py"]
    alone = {name: value for name, value in environment().items() if name != "PYTHONPATH" and "TOX" not in name}
    start = [sys.executable, *words[1:], "--", *narrow]
    done = subprocess.run(start, cwd=checkout, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])


@pytest.mark.parametrize(("name", "line"), documents.of_examples())
def test_a_command_of_an_example_runs_in_its_folder(name: str, line: str, tmp_path: Path) -> None:
    if name == "private_finetuning":
        pytest.importorskip("opacus")
    made = Path(shutil.copytree(EXAMPLES / name, tmp_path / name))
    for words in documents.parts(line):
        start = [sys.executable, "-m", *words]
        done = subprocess.run(start, cwd=made, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout[-3000:], done.stderr[-3000:])
