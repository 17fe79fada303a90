"""Ranks that end badly, and what ranks believe is their own."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import RankResult, RunRequest, deadlock
from fsdpcheck.simulation import run as run_module
from tests.simulation.simulator import Simulator, failure_of, keep, skips


def test_an_exception_on_one_rank_is_one_failure(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            raise ValueError("boom")
        dist.barrier()

    execution = simulate(body, 3)
    text = failure_of(execution, "raised")
    assert "ValueError: boom" in text
    assert execution.failure is not None
    assert execution.failure.exception == "ValueError"
    assert {state.state for state in execution.failure.ranks if state.rank != 1} == {"blocked"}


@pytest.mark.parametrize("leave", [sys.exit, lambda code: os._exit(code)], ids=["sys.exit", "os._exit"])
def test_a_rank_that_exits_is_a_failure_and_no_exit(simulate: Simulator, leave: Callable[[int], None]) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            leave(3)
        dist.barrier()

    assert "rank 1 left with exit code 3" in failure_of(simulate(body), "exited")


def test_after_a_failure_the_next_run_is_clean(simulate: Simulator) -> None:
    def fine(rank: int, size: int, result: RankResult) -> None:
        value = torch.ones(1)
        dist.all_reduce(value)
        keep(result, value=value)

    before = simulate(fine, 3)
    failure_of(simulate(skips, 3), "deadlock")
    after = simulate(fine, 3)
    assert after.failure is None
    assert [rank.trace for rank in after.ranks] == [rank.trace for rank in before.ranks]
    assert not dist.is_initialized()


def test_a_rank_that_never_stops_computing_is_no_progress_not_a_deadlock() -> None:
    stop = False

    def program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
        while rank == 1 and not stop:
            pass
        dist.barrier()

    engine = InProcessEngine(program=program, budget_seconds=0.05)
    execution = engine.run(
        RunRequest(TrainingCase(ModelSpec((LayerSpec(1),)), mesh=MeshSpec(dp_shard=2)), "fully_shard")
    )
    stop = True
    assert "rank 1: running" in failure_of(execution, "no progress")


def test_a_rank_that_computes_in_a_library_is_said_to_be_there_too() -> None:
    """A loop without end in torch, as DTensor's ``view_groups`` on no samples, is seldom where the program calls it."""
    stack = ('  File "/mine.py", line 3, in step\n    loss()', '  File "/torch/_view_ops.py", line 9, in view_groups\n')
    assert run_module.inside(deadlock.Running(1, "/mine.py:3", stack)) == ", in view_groups at /torch/_view_ops.py:9"
    assert run_module.inside(deadlock.Running(1, "/mine.py:3", stack[:1])) == ""
    assert run_module.inside(deadlock.Running(1, "", ())) == ""


def test_a_run_inside_a_run_is_refused(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        with pytest.raises(UsageError):
            simulate(skips)

    assert simulate(body, 1).failure is None


# -- what ranks believe is their own -------------------------------------------------------------------------------


def test_process_globals_belong_to_one_rank(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        warnings.simplefilter("ignore" if rank else "error")
        dist.barrier()
        assert os.environ["RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == str(size)
        assert torch.get_default_dtype() is (torch.float64 if rank else torch.float32)
        assert warnings.filters[0][0] == ("ignore" if rank else "error")
        drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
        dist.barrier()
        drawn += [torch.rand(1).item(), random.random(), np.random.rand()]
        keep(result, drawn=torch.tensor(drawn, dtype=torch.float64))

    outside = (os.environ.get("RANK"), torch.get_default_dtype(), list(warnings.filters), random.getstate())
    execution = simulate(body, 3)
    assert execution.failure is None, execution.failure
    assert outside == (os.environ.get("RANK"), torch.get_default_dtype(), list(warnings.filters), random.getstate())
    for rank, result in enumerate(execution.ranks):
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            kept = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64 if rank else torch.float32)
            ours, theirs = random.Random(rank), np.random.RandomState(rank)
            wanted = [torch.rand(1).item(), ours.random(), theirs.rand()]
            wanted += [torch.rand(1).item(), ours.random(), theirs.rand()]
            torch.set_default_dtype(kept)
        assert result.initial["drawn"].tolist() == wanted


def _settings() -> dict[str, object]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "hook": sys.excepthook,
        "logging": logging.root.manager.disable,
        "folder": os.getcwd(),
    }


def test_settings_belong_to_one_rank(simulate: Simulator, tmp_path: Path) -> None:
    """Ranks that set everything, and one that sets nothing and sees nothing of it; afterwards all is back."""
    outside = _settings()

    def body(rank: int, size: int, result: RankResult) -> None:
        before = _settings()
        if rank != 1:
            torch.use_deterministic_algorithms(True, warn_only=rank == 0)
            torch.set_float32_matmul_precision("high" if rank else "medium")
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            sys.stdout, sys.stderr, sys.excepthook = io.StringIO(), io.StringIO(), lambda *_: None
            logging.disable(10 + rank)
            os.chdir(tmp_path if rank else tmp_path.parent)
        mine = _settings()
        same = {name for name, value in mine.items() if before[name] == value}
        assert same == (set(before) if rank == 1 else {"warn only"} if rank == 2 else set())
        for _ in range(2):
            dist.barrier()
            assert _settings() == mine

    execution = simulate(body, 3)
    assert execution.failure is None, execution.failure.text
    assert _settings() == outside
