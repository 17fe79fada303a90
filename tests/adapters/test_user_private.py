"""A user's own private step: a right one holds, planted faults are found, and what is not said is asked for."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fsdpcheck import adapters
from fsdpcheck.case import UserModelSpec
from fsdpcheck.cli import main
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.workload.user_model import inspection

TOYS = Path(__file__).parent.parent / "toys"
MODEL, PARTS = str(TOYS / "own_parts.py"), str(TOYS / "own_privacy.py")
FLAT, NESTED = "factor=reciprocal+1e-6+flat", "factor=reciprocal+1e-6+nested"


@functools.cache
def _own() -> UserModelSpec:
    return inspection.inspect(f"{MODEL}:build", f"{MODEL}:batch", "", None).own


def _judged(engine: SimulatedEngine, law: str, parts: str, most: int = 4, on_own_model: bool = True) -> Verdict:
    run = Run(engine, f"{PARTS}:parallelize,{parts}", own=_own() if on_own_model else None)
    return check_law(chapters()[law], run, world_sizes=(2, 4), most=most, shrink=False)


@pytest.mark.parametrize(
    ("law", "parts"),
    [
        ("clipping.coefficients", f"private=private,{FLAT}"),
        ("clipping.norms", f"private=private,{FLAT},shows=norms+factors"),
        ("clipping.factors", f"private=private,{FLAT},shows=norms+factors"),
        ("training.private-clipped", f"private=private,{FLAT}"),
        ("privacy.sensitivity", f"private=private,{FLAT}"),
        ("clipping.sum", f"private=nested,{NESTED}"),
        ("noise.once", f"private=noisy,{FLAT}"),
    ],
)
def test_a_right_step_holds(law: str, parts: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize("law", ["clipping.coefficients", "noise.scale"])
def test_a_right_step_holds_on_models_of_fsdpcheck(law: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, f"private=noisy,{FLAT}", on_own_model=False)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize(
    ("law", "parts", "on_own_model"),
    [
        ("clipping.sum", f"private=clips_the_sum,{FLAT}", True),
        ("privacy.sensitivity", f"private=leaves_biases_out,{FLAT}", True),
        ("clipping.coefficients", f"private=averages,{FLAT}", True),
        ("clipping.coefficients", f"private=without_eps,{FLAT}", True),
        ("clipping.norms", f"private=shows_squares,{FLAT},shows=norms", True),
        ("noise.scale", f"private=noise_on_each_rank,{FLAT}", False),
    ],
)
def test_a_wrong_step_is_found(law: str, parts: str, on_own_model: bool, engine: SimulatedEngine) -> None:
    assert _judged(engine, law, parts, most=15, on_own_model=on_own_model).status == "finding"


def test_what_a_step_does_not_show_or_take_is_not_promised() -> None:
    laws, features = chapters(), adapters.load(f"{PARTS}:parallelize,private=nested,{NESTED}").features
    assert laws["clipping.norms"].not_promised(features) == "the adapter does not show norms"
    assert "takes no noise_multiplier" in laws["noise.once"].not_promised(features)
    assert "norms of norms" in laws["training.private-clipped"].not_promised(features)
    assert laws["clipping.sum"].not_promised(features) == ""
    assert "--private one that clips" in laws["training.plain"].not_promised(features)


def test_what_is_said_to_be_shown_and_is_not_is_told(engine: SimulatedEngine) -> None:
    verdict = _judged(engine, "clipping.norms", f"private=nested,{NESTED},shows=norms")
    assert (verdict.status, verdict.exit_code) == ("error", 2)
    assert "leave norms out of --shows" in verdict.reason


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("private=private", "say how factors come of norms"),
        ("private=private,factor=reciprocal+lots+flat", "reciprocal,lots,flat"),
        ("private=private,factor=reciprocal+1e-6+round", "reciprocal,1e-6,flat"),
        (f"private=private,{FLAT},shows=losses", "--shows norms,factors"),
        (f"private=no_bound,{FLAT}", "max_grad_norm, normaliser"),
        (f"private=more,{FLAT}", "others have defaults"),
        (f"private=private,step=nested,{FLAT}", "one of them"),
        (f"private=private,{FLAT},param-dtype=bfloat16,reduce-dtype=float32", "leave --param-dtype out"),
        (FLAT, "name it with --private"),
    ],
)
def test_a_step_of_which_too_little_is_said_is_refused(parts: str, said: str) -> None:
    with pytest.raises(AdapterError) as told:
        adapters.load(f"{PARTS}:parallelize,{parts}")
    assert said in str(told.value)


def test_the_command_line_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    of = ["--model", f"{MODEL}:build", "--batch", f"{MODEL}:batch", "--parallelize", f"{PARTS}:parallelize"]
    assert main(["run", *of, "--private", "private", "--factor", "reciprocal,1e-6"]) == 2
    assert "reciprocal,1e-6\n" in capsys.readouterr().out
