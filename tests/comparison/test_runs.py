"""Runs in processes of their own: forked from this one where that may be, or from one that has done nothing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fsdpcheck.comparison import runs
from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.record import Observation
from fsdpcheck.comparison.runs import NOTHING_SAID, Draws, Run
from fsdpcheck.errors import UsageError
from fsdpcheck.simulation.simulate import Options

TRAIN = """
import sys
import torch
model = torch.nn.Linear(2, 1)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.5).step()
print("marked" if "of_the_parent" in sys.modules else "clean", *sys.argv[1:])
"""
DRAWING = """
import random
import numpy
import torch
model = torch.nn.Linear(2, 1)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.5).step()
print(torch.rand(1).item(), random.random(), numpy.random.rand(), numpy.random.randn())
"""
WAYS = pytest.mark.parametrize("forked", [True, False], ids=["forked", "a process that has done nothing"])


def _observed(
    folder: Path, source: str, words: str = "", many: int = 1, size: int = 1, draws: Draws = NOTHING_SAID
) -> list[tuple[Run, Observation]]:
    (folder / "train.py").write_text(source)
    wanted = [Run(size, entropy=1000 * number) for number in range(many)]
    line = read(f"{folder / 'train.py'} {words}")
    return list(runs.each_observed(line, wanted, Options(show=False), jobs=2, draws=draws))


@pytest.fixture
def way(forked: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(runs, "_may_be_forked", lambda: forked)
    monkeypatch.setitem(sys.modules, "of_the_parent", ModuleType("of_the_parent"))
    return forked


@WAYS
def test_a_run_has_what_its_process_was_forked_from(tmp_path: Path, way: bool) -> None:
    (_, found), _ = _observed(tmp_path, TRAIN, "'two words' {W}", many=2)
    assert found.failure is None
    assert found.printed == (f"{'marked' if way else 'clean'} two words 1\n",)
    assert found.ranks[0].steps == [1]


@WAYS
def test_what_ends_the_process_is_the_failure_of_its_run(tmp_path: Path, way: bool) -> None:
    ends = (
        "import ctypes, faulthandler, os\nfaulthandler.disable()\nos.write(2, b'last words\\n')\nctypes.string_at(0)\n"
    )
    ((run, found),) = _observed(tmp_path, ends)
    assert found.failure is not None
    assert found.failure.text.splitlines() == [
        "lost: the process of the ranks was killed by SIGSEGV",
        f"  where   {run}",
        "  it printed last",
        "    last words",
    ]


@WAYS
def test_what_loggers_and_programs_print_is_printed_by_none(
    tmp_path: Path, way: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    _observed(
        tmp_path, "import os, sys, subprocess\nos.write(2, b'one')\nsubprocess.run(['echo', 'two'], check=True)\n"
    )
    assert capfd.readouterr() == ("", "")


@WAYS
def test_a_script_that_cannot_be_read_is_told(tmp_path: Path, way: bool) -> None:
    with pytest.raises(UsageError, match=r"train\.py.*2"):
        _observed(tmp_path, "first = 1\nfirst = = 2\n")


@WAYS
def test_runs_that_nobody_waits_for_are_ended(tmp_path: Path, way: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], runs._started
    monkeypatch.setattr(runs, "_started", lambda *of: started.append(start(*of)) or started[-1])
    (tmp_path / "train.py").write_text("import os, signal\nif os.environ['WORLD_SIZE'] == '2': signal.pause()\n")
    line = read(str(tmp_path / "train.py"))
    those = runs.each_observed(line, [Run(2), Run(1)], Options(show=False), jobs=2)
    assert next(those)[0] == Run(1)
    those.close()
    assert [process.returncode for process in started] == [-signal.SIGKILL, 0]


def test_what_nobody_seeds_is_drawn_by_each_process_and_run_anew(tmp_path: Path) -> None:
    printed = [found.printed for _, found in _observed(tmp_path, DRAWING, many=2, size=2)]
    words = [text.split() for texts in printed for text in texts]
    assert all(len(set(column)) == 4 for column in zip(*words, strict=True)), printed


def test_a_seed_that_the_user_says_is_that_of_each_process_and_run(tmp_path: Path) -> None:
    (_, one), (_, other) = _observed(tmp_path, DRAWING, many=2, size=2, draws=Draws(seed=5))
    seeds = "import random, numpy, torch\ntorch.manual_seed(5), random.seed(5), numpy.random.seed(5)\n"
    ((_, seeded),) = _observed(tmp_path, seeds + DRAWING)
    assert one.printed == other.printed == seeded.printed * 2


def test_where_there_is_a_gpu_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        assert runs._may_be_forked() is not there
