"""What a user's functions cannot run with here is an error that says what to do; a bug of theirs is a finding."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fsdpcheck.case import UserModelSpec
from fsdpcheck.cli import main
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.workload.user_model import inspection

TOYS = Path(__file__).parent.parent / "toys"
MODEL, PARTS = str(TOYS / "own_parts.py"), str(TOYS / "own_precision.py")


@functools.cache
def _own() -> UserModelSpec:
    return inspection.inspect(f"{MODEL}:build", f"{MODEL}:batch", "", None).own


def _judged(engine: SimulatedEngine, parts: str) -> Verdict:
    run = Run(engine, f"{PARTS}:{parts}", own=_own())
    return check_law(chapters()["training.plain"], run, world_sizes=(2,), most=3, shrink=False)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("only_float32", "say so: --param-dtype float32"),
        ("divided_by_one,averaging=none,param-dtype=float32", "set_force_sum_reduction_for_comms(True)"),
        ("on_cuda", "functions that run on a CPU"),
        ("without_package", "No module named 'no_such_package_of_kernels'"),
        ("package_on_rank_0", "No module named 'no_such_package_of_kernels'"),
        ("without_ninja", "the compiler or build tool"),
        ("without_compiler", "the compiler or build tool"),
        ("renamed", "no parameter of this name"),
    ],
)
def test_what_cannot_run_here_is_an_error(parts: str, said: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, parts)
    assert (verdict.status, verdict.exit_code) == ("error", 2)
    assert said in verdict.reason
    assert "  got " in verdict.reason
    assert "  next " in verdict.reason


@pytest.mark.parametrize("parts", ["a_bug", "a_bug_of_one_rank", "a_bug_that_speaks_of_imports"])
def test_what_raises_in_every_dtype_is_a_finding(parts: str, engine: SimulatedEngine) -> None:
    assert _judged(engine, parts).status == "finding"


def test_the_session_ends_with_the_code_of_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    of = ["--model", f"{MODEL}:build", "--batch", f"{MODEL}:batch", "--parallelize", f"{PARTS}:on_cuda"]
    assert main(["run", *of, "--law", "training.plain", "--world-size", "2", "--jobs", "1"]) == 2
    assert "Torch not compiled with CUDA enabled" in capsys.readouterr().out
