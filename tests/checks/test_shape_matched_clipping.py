"""Clipping on real numbers: right reports and sums pass, a factor an ulp off and a sum beyond the bound do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch

from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.shape_matched_clipping import assert_clipped_sum_near, assert_factors_follow
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import bounds
from fsdpcheck.workload.user_model import inspection

TOYS = str(Path(__file__).parents[1] / "toys" / "own_models.py")
REAL = TrainingCase(
    ModelSpec((LayerSpec(4, bias=True, activation="relu"), LayerSpec(3)), "sequence", 3, length=3, units=(1,)),
    MeshSpec(2),
    BatchLayout("ragged", 4, counts=(3, 1)),
    StepSpec(clipping="probe", micro_batches=2, clip_norm=2, normaliser=4),
    Arithmetic(project=False, numbers="real"),
    seed=3,
)
RULE = FactorRule(eps=1e-6)


@cache
def own() -> TrainingCase:
    """REAL on a model that a user wrote."""
    model = inspection.inspect(f"{TOYS}:with_surrogate", f"{TOYS}:batch").own
    return replace(REAL, model=ModelSpec((), own=model))


CASES: dict[str, Callable[[], TrainingCase]] = {
    "drawn": lambda: REAL,
    "own": own,
    "replicated": lambda: replace(own(), layout=BatchLayout("replicated", 3)),
    "with replicas": lambda: replace(own(), mesh=MeshSpec(2, 2), layout=BatchLayout("contiguous", 6)),
}


def executed(engine: SimulatedEngine, case: TrainingCase = REAL, adapter: str = "reference") -> Execution:
    execution = Run(engine, adapter)(case, observe={"norms", "factors", "grads"})
    assert execution.failure is None
    factors = torch.cat([result.steps[0].factors for result in execution.ranks if result.steps[0].factors is not None])
    assert bool((factors < 1).any())
    return execution


@pytest.mark.parametrize("adapter", ["reference", "reference:bookkeeping", "reference_fsdp2"])
@pytest.mark.parametrize("name", CASES)
def test_right_ones_pass(engine: SimulatedEngine, name: str, adapter: str) -> None:
    execution = executed(engine, CASES[name](), adapter)
    assert_factors_follow(execution, RULE)
    assert_clipped_sum_near(execution, RULE)


@pytest.mark.parametrize("nested", [False, True])
def test_a_factor_an_ulp_off_is_found_unless_norms_are_nested(engine: SimulatedEngine, nested: bool) -> None:
    execution = executed(engine)
    factors = execution.ranks[0].steps[0].factors
    assert factors is not None
    place = int((factors < 1).nonzero()[0])
    factors[place] = torch.nextafter(factors[place], torch.tensor(0.0, dtype=torch.float64))
    if not nested:
        with pytest.raises(Violation, match="not the declared rule of the reported norms"):
            assert_factors_follow(execution, RULE)
    else:
        assert_factors_follow(execution, replace(RULE, nested=True))
        factors[place] *= 1 - 2.0**-40
        with pytest.raises(Violation, match="not the declared rule"):
            assert_factors_follow(execution, replace(RULE, nested=True))


@pytest.mark.parametrize("wrong", ["few", "none"])
def test_reports_of_another_form_are_violations(engine: SimulatedEngine, wrong: str) -> None:
    execution = executed(engine)
    record = execution.ranks[0].steps[0]
    assert record.norms is not None
    assert record.factors is not None
    if wrong == "few":
        record.norms = record.norms[1:]
    else:
        record.factors = record.factors[:0]
    with pytest.raises(Violation, match=r"float64\[[02]\]"):
        assert_factors_follow(execution, RULE)


@pytest.mark.parametrize("case", ["drawn", "own"])
def test_an_error_above_the_bound_is_found_and_some_ulps_are_not(engine: SimulatedEngine, case: str) -> None:
    execution = executed(engine, CASES[case]())
    gradient = execution.ranks[1].steps[0].grads
    assert gradient is not None
    name = next(iter(gradient))
    flat = gradient[name].view(-1)
    largest = int(flat.abs().argmax())
    flat[largest] *= 1 + 2.0**-50
    assert_clipped_sum_near(execution, RULE)
    flat[largest] *= 1 + 1e-6
    with pytest.raises(Violation, match="not the sum of clipped per-sample gradients") as caught:
        assert_clipped_sum_near(execution, RULE)
    assert f"step 0, rank 1, {name}" in caught.value.where


def test_a_rule_with_another_eps_is_found(engine: SimulatedEngine) -> None:
    with pytest.raises(Violation, match="not the sum of clipped"):
        assert_clipped_sum_near(executed(engine, own()), replace(RULE, eps=1e-3))


def test_what_is_not_clipped_is_said_to_be(engine: SimulatedEngine) -> None:
    install = "fsdpcheck.impl.faults:nothing_is_clipped"
    execution = Run(engine, "reference", (install,))(own(), observe={"norms", "factors", "grads"})
    for check in (assert_factors_follow, assert_clipped_sum_near):
        with pytest.raises(Violation) as caught:
            check(execution, RULE)
        assert [cause.key for cause in caught.value.causes or ()] == ["not clipped"]


def test_the_range_of_a_factor_holds_what_is_computed() -> None:
    for norm in (0.0, 0.5, 1.0 - 1e-6, 3.0, 1e300):
        low, high = bounds.factor_range(Fraction(norm) ** 2, Fraction(norm) ** 2, 1.0, RULE)
        computed = Fraction(min(1.0, 1.0 / (norm + RULE.eps)))
        assert low <= computed <= high <= 1
        assert high - low <= Fraction(1, 2**49) * computed
    assert bounds.factor_range(Fraction(0), Fraction(0), 1.0, FactorRule()) == (1, 1)
    assert math.isclose(bounds.factor_range(Fraction(1), Fraction(4), 1.0, FactorRule())[0], 0.5)


def test_float32_is_left_out_and_counted() -> None:
    single = replace(REAL, arithmetic=Arithmetic("float32", project=False, numbers="real"))
    with pytest.raises(NotExact, match="float64"):
        assert_clipped_sum_near(Execution("fabricated", RunRequest(single, "reference"), []), RULE)
