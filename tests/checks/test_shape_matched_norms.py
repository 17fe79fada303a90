"""Norms on real numbers: right ones pass on either algebraic path, too small ones and no numbers do not."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.shape_matched_norms import assert_norms_near
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import bounds
from fsdpcheck.oracle.certificate import traced_gradients

REAL = TrainingCase(
    ModelSpec((LayerSpec(4, bias=True, activation="relu"), LayerSpec(3)), "sequence", 3, length=3, units=(1,)),
    MeshSpec(2),
    BatchLayout("ragged", 4, counts=(3, 1)),
    StepSpec(clipping="probe", micro_batches=2),
    Arithmetic(project=False, numbers="real"),
    seed=3,
)


def executed(engine: SimulatedEngine, case: TrainingCase = REAL) -> Execution:
    execution = Run(engine, "reference")(case, observe={"norms"})
    assert execution.failure is None
    return execution


def changed(execution: Execution, factor: float) -> Execution:
    """``execution`` with the norm of rank 0's last sample, which is in its second micro-batch, times ``factor``."""
    norms = execution.ranks[0].steps[0].norms
    assert norms is not None
    norms[-1] *= factor
    return execution


def test_norms_of_a_rounded_computation_pass(engine: SimulatedEngine) -> None:
    assert_norms_near(executed(engine))
    assert_norms_near(changed(executed(engine), 1 + 2**-52))


def test_a_norm_that_is_too_small_is_said_to_be(engine: SimulatedEngine) -> None:
    with pytest.raises(Violation, match="below the norm") as caught:
        assert_norms_near(changed(executed(engine), 1 - 1e-9))
    assert "step 0, rank 0, sample 2 (local 2); it is clipped too little" in caught.value.where
    assert caught.value.cause == ""


@pytest.mark.parametrize(("power", "noun"), [(1, "norms are"), (2, "squared norms are")])
def test_a_norm_in_few_bits_is_told_from_one_that_is_a_little_wrong(
    engine: SimulatedEngine, power: int, noun: str
) -> None:
    execution = executed(engine)
    norms = execution.ranks[0].steps[0].norms
    assert norms is not None
    norms[-1] = (norms[-1] ** power).float().double() ** (1 / power)
    with pytest.raises(Violation, match="the norm of the sample's gradient") as caught:
        assert_norms_near(execution)
    assert caught.value.cause == f"{noun} rounded to 24 bits, the precision of float32"
    norms[-1] *= 1 + 2.0**-40
    with pytest.raises(Violation) as caught:
        assert_norms_near(execution)
    assert caught.value.cause == ""


@pytest.mark.parametrize("factor", [1 + 1e-9, 2.0, -1.0, math.nan, math.inf])
def test_a_norm_that_is_too_large_or_no_norm_is_found(engine: SimulatedEngine, factor: float) -> None:
    with pytest.raises(Violation, match=r"not the norm of the sample's gradient|a reported value is not finite"):
        assert_norms_near(changed(executed(engine), factor))


@pytest.mark.parametrize("scale", [1.0, 2.0**-30], ids=["no cancellation", "nearly all cancels"])
def test_the_range_holds_what_exact_and_rounded_sums_give(scale: float) -> None:
    """Of a Linear(1, 1) at two positions: gradient a + b exactly, and its square by the Gram form in float64."""
    weight = torch.nn.Parameter(torch.tensor([[0.3]], dtype=torch.float64))
    inputs = torch.tensor([[0.7], [-0.7 * (1 - scale / 3)]], dtype=torch.float64)
    losses = (inputs @ weight.T).sum().reshape(1)
    gradient, paths = traced_gradients(losses, {"weight": weight}, torch.ones(1, dtype=torch.float64), keep=False)
    least, most = bounds.squared_norm_range(REAL, gradient, paths)
    exact = sum((Fraction(value) for value in inputs.flatten().tolist()), Fraction(0)) ** 2
    gram = Fraction(float((inputs @ inputs.T).sum()))
    assert least <= exact <= most
    assert least <= gram <= most
    assert most - least < Fraction(1, 10**12)
    assert (least == 0) == (scale < 1)


def test_other_dtypes_are_left_out_and_counted() -> None:
    single = replace(REAL, arithmetic=Arithmetic("float32", project=False, numbers="real"))
    with pytest.raises(NotExact, match="float64"):
        assert_norms_near(Execution("fabricated", RunRequest(single, "reference"), []))
