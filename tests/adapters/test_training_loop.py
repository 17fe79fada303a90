"""The ordinary loop: what it leaves to a model, and how."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import RunRequest

CASE = TrainingCase(
    ModelSpec((LayerSpec(4, activation="relu"), LayerSpec(2)), features=2, units=(1, 1)),
    MeshSpec(2),
    BatchLayout("contiguous", 6),
    StepSpec(steps=1, micro_batches=3, normaliser=4),
)


@pytest.mark.parametrize(
    ("adapter", "op"), [("ddp", "all_reduce"), ("zero_redundancy", "all_reduce"), ("tensor_parallel", "reduce_scatter")]
)
def test_gradients_are_reduced_with_the_last_micro_batch_or_with_each(
    adapter: str, op: str, engine: SimulatedEngine
) -> None:
    """``no_sync`` and ``set_requires_gradient_sync``, of which no wrong number tells where nothing rounds."""

    def reductions(every: bool) -> int:
        case = replace(CASE, step=replace(CASE.step, sync_every=every))
        execution = engine.run(RunRequest(case, adapter))
        assert execution.failure is None
        return sum(call.op == op for call in execution.ranks[0].trace)

    assert reductions(every=True) == 3 * reductions(every=False) > 0
