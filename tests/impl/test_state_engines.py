"""A reference that is stopped, saved and loaded before each step, on simulated and on real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdpcheck.case import BatchLayout, Case, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec
from fsdpcheck.engines import open_engine
from fsdpcheck.engines.base import Engine
from fsdpcheck.execution import Execution, RunRequest

RESUMING = f"{Path(__file__).with_name('adapters_for_state.py')}:adapter"


@pytest.fixture(scope="module", params=["simulated", "processes"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = open_engine(request.param)
    yield opened
    opened.close()


def run(engine: Engine, adapter: str, optimizer: OptimizerSpec) -> Execution:
    model = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(1)), features=3, units=(1,))
    step = StepSpec(steps=4, optimizer=optimizer)
    case = Case(model, MeshSpec(3), BatchLayout("contiguous", 6), step)
    execution = engine.run(RunRequest(case, adapter, frozenset({"params", "grads"})))
    assert execution.failure is None, execution.failure.text
    return execution


OPTIMIZERS = [OptimizerSpec(momentum=0.5), OptimizerSpec("adam"), OptimizerSpec("adamw", weight_decay=0.5)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda spec: spec.kind)
def test_stopping_changes_no_bit(engine: Engine, optimizer: OptimizerSpec) -> None:
    wanted = run(engine, "reference", optimizer)
    got = run(engine, RESUMING, optimizer)
    for rank in range(3):
        for one, other in zip(got.ranks[rank].steps, wanted.ranks[rank].steps, strict=True):
            assert one.params.keys() == other.params.keys()
            assert all(torch.equal(one.params[name], value) for name, value in other.params.items())
            assert one.grads is not None
            assert other.grads is not None
            assert all(torch.equal(one.grads[name], value) for name, value in other.grads.items())
    assert len(got.ranks[0].steps) == 4
    assert sum(call.op == "scatter" for call in got.ranks[0].trace) == 3 * 2 * 2  # resumed three times
