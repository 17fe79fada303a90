"""DeepSpeed's three stages: what each rank keeps apart, and that mistakes of a user are found."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

pytest.importorskip("deepspeed")

from torch import nn

from fsdpcheck.adapters.builtin import deepspeed as adapted
from fsdpcheck.adapters.contract import GlobalNormRule, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run

TWICE = TrainingCase(
    ModelSpec((LayerSpec(3, activation="relu", bias=True), LayerSpec(1)), features=2, units=(1, 1)),
    MeshSpec(2),
    BatchLayout("contiguous", 4),
    StepSpec(micro_batches=2, sync_every=False, normaliser=2),
    Arithmetic(dtype="float32"),
)
"""Of the last layer one rank has all, so that shards are padded."""


class Forgetful(adapted.DeepSpeed):
    """Every micro-batch is said to be the last of its step."""

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        loop = super().build(model, setup)
        loop.reducing = lambda number, last: _boundary(loop)  # type: ignore[method-assign]
        return loop


def _boundary(loop: TrainingLoop) -> AbstractContextManager[object]:
    loop.model.set_gradient_accumulation_boundary(True)  # type: ignore[operator]
    return nullcontext()


class Clipping(adapted.DeepSpeed):
    """Clips by the norm 1, which is what an engine does that nobody tells otherwise."""

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        loop = super().build(model, replace(setup, step=replace(setup.step, max_grad_norm=1.0)))
        loop.setup = setup
        return loop


forgetful1, forgetful2 = Forgetful(1), Forgetful(2)
clipping1, clipping2, clipping3 = Clipping(1), Clipping(2), Clipping(3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_right_and_a_clip_that_nobody_asked_for_is_found(stage: int, engine: SimulatedEngine) -> None:
    run = Run(engine, f"deepspeed:zero{stage}")
    assert_gradients_equal(run(TWICE, observe={"grads"}), run.answer(TWICE))
    assert_parameters_equal(run(TWICE), run.answer(TWICE))
    run = Run(engine, f"{__name__}:clipping{stage}")
    with pytest.raises(Violation, match="the parameters are not the single device's"):
        assert_parameters_equal(run(TWICE), run.answer(TWICE))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_boundary_at_each_micro_batch_is_found_where_it_loses_gradients(stage: int, engine: SimulatedEngine) -> None:
    """Stage 3 adds up all the same: there the boundary says only when gradients go to the optimizer."""
    run = Run(engine, f"{__name__}:forgetful{stage}")
    with pytest.raises(Violation, match="the parameters are not the single device's"):
        assert_parameters_equal(run(TWICE), run.answer(TWICE))


def test_only_the_norm_of_the_third_stage_is_float64_to_the_end(engine: SimulatedEngine) -> None:
    """Why ``GlobalNormRule`` differs: what each stage returns is told by its dtype."""
    clipped = replace(TWICE, step=replace(TWICE.step, max_grad_norm=0.5))
    for stage, made in ((1, adapted.zero1), (2, adapted.zero2), (3, adapted.zero3)):
        run = Run(engine, f"deepspeed:zero{stage}")
        norm = run(clipped, observe={"grad_norm"}).ranks[0].steps[0].grad_norm
        assert norm is not None
        assert str(norm.dtype).removeprefix("torch.") == made.features.global_norm.of("float32")
    assert adapted.zero3.features.global_norm == GlobalNormRule(nested=True, dtype="float64", eps=1e-6)
