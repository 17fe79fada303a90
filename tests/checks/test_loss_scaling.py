"""Runs whose losses differ by a power of two: linear ones pass bit for bit, an ulp and a floor are found."""

from __future__ import annotations

import pytest
import torch

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.loss_scaling import TIMES, assert_scaled
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run

CASE = TrainingCase(
    ModelSpec((LayerSpec(4, bias=True, activation="gelu"), LayerSpec(3, kind="linear")), features=3, units=(1,)),
    MeshSpec(2),
    BatchLayout("ragged", 4, counts=(3, 1)),
    StepSpec(clipping="probe", clip_norm=1 << 40),
    Arithmetic(project=False, numbers="real"),
    seed=3,
)


def executed(engine: SimulatedEngine, *installs: str) -> tuple[Execution, Execution]:
    run = Run(engine, "reference", installs)
    return run(CASE, observe={"norms", "grads"}), run(CASE, observe={"norms", "grads"}, loss_times=TIMES)


def test_a_linear_step_passes(engine: SimulatedEngine) -> None:
    whole, scaled = executed(engine)
    assert_scaled(whole, scaled, whole.request.clip_norm)


@pytest.mark.parametrize("field", ["norms", "grads"])
def test_an_ulp_is_found(engine: SimulatedEngine, field: str) -> None:
    whole, scaled = executed(engine)
    record = scaled.ranks[1].steps[0]
    assert record.norms is not None
    assert record.grads is not None
    value = record.norms if field == "norms" else record.grads["tail.linear1.weight"][0]
    value[0] *= 1 + 2**-52
    with pytest.raises(Violation, match="with the losses") as caught:
        assert_scaled(whole, scaled, whole.request.clip_norm)
    assert caught.value.where.startswith("step 0, rank 1")


def test_norms_that_are_missing_from_both_runs_are_not_equal(engine: SimulatedEngine) -> None:
    whole, scaled = executed(engine)
    for execution in (whole, scaled):
        execution.ranks[0].steps[0].norms = torch.zeros(0, dtype=torch.float64)
    with pytest.raises(Violation, match="not every sample has a norm\n  got     float64\\[0\\]\n  wanted  3 norms"):
        assert_scaled(whole, scaled, whole.request.clip_norm)


def test_gradients_of_clipped_samples_are_not_compared(engine: SimulatedEngine) -> None:
    whole, scaled = executed(engine)
    grads = scaled.ranks[1].steps[0].grads
    assert grads is not None
    grads["tail.linear1.weight"] += 1
    assert_scaled(whole, scaled, clip_norm=1e-9)
    with pytest.raises(Violation, match="unclipped gradient"):
        assert_scaled(whole, scaled, whole.request.clip_norm)


def test_a_floor_is_named(engine: SimulatedEngine) -> None:
    whole, scaled = executed(engine, "fsdpcheck.impl.faults:squared_norms_have_a_floor")
    with pytest.raises(Violation, match="norms do not grow") as caught:
        assert_scaled(whole, scaled, whole.request.clip_norm)
    assert caught.value.cause == "small norms are replaced by 1e-06, a constant of its own"
