"""A reference that is stopped, saved and loaded before each step, on simulated and on real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.engines import open_engine
from fsdpcheck.engines.base import Engine
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.impl import state
from fsdpcheck.workload import models
from fsdpcheck.workload.optimizer import make_optimizer
from tests.impl.ways import WAYS

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

RESUMING = f"{Path(__file__).with_name('adapters_for_state.py')}:adapter"


@pytest.fixture(scope="module", params=["simulated", "processes"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = open_engine(request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def kept(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Execution]:
    """A folder with a checkpoint of each step of a run, and the run."""
    folder = tmp_path_factory.mktemp("kept")
    here = Path(__file__).with_name("adapters_for_state.py").read_text(encoding="utf-8")
    adapter = folder / "keeper_for_state.py"
    adapter.write_text(f"{here}\n\nkeeper = Keeper({str(folder)!r})\n", encoding="utf-8")
    return folder, run(engine, f"{adapter}:keeper", OPTIMIZERS["adam"])


def run(engine: Engine, adapter: str, optimizer: OptimizerSpec) -> Execution:
    model = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(1)), features=3, units=(1,))
    step = StepSpec(steps=4, optimizer=optimizer)
    case = TrainingCase(model, MeshSpec(3), BatchLayout("contiguous", 6), step)
    execution = engine.run(RunRequest(case, adapter, frozenset({"params", "grads"})))
    assert execution.failure is None, execution.failure.text
    return execution


OPTIMIZERS = {
    "adam": OptimizerSpec("adam"),
    "sgd": OptimizerSpec(momentum=0.5),
    "adamw": OptimizerSpec("adamw", weight_decay=0.5),
}


@pytest.mark.parametrize(
    ("engine", "optimizers"),
    [
        ("simulated", list(OPTIMIZERS)),
        ("processes", ["adam"]),
        pytest.param("processes", ["sgd", "adamw"], marks=pytest.mark.nightly),
    ],
    indirect=["engine"],
)
def test_stopping_changes_no_bit(engine: Engine, optimizers: list[str]) -> None:
    for optimizer in optimizers:
        stopped_as_never_stopped(engine, OPTIMIZERS[optimizer])


def stopped_as_never_stopped(engine: Engine, optimizer: OptimizerSpec) -> None:
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


@pytest.mark.parametrize("way", WAYS)
def test_what_one_engine_saved_another_loads_at_other_numbers_of_ranks(
    kept: tuple[Path, Execution], ranks: Ranks, way: str
) -> None:
    folder, saved = kept

    def load(rank: int) -> tuple[dict[str, torch.Tensor], Any]:
        units = [name for names in models.unit_names(saved.request.case) for name in names]
        model = WAYS[way](models.build(saved.request.case), units, True)
        optimizer = make_optimizer(OPTIMIZERS["adam"], model.shards())
        state.load(folder / "3", model, optimizer)
        return model.full_values(), [entry["step"].item() for entry in optimizer.state.values()]

    for world_size in (1, 2, 4):
        for values, steps in ranks(load, world_size):
            assert all(torch.equal(values[name], value) for name, value in saved.ranks[0].steps[2].params.items())
            assert set(steps) == {3.0}
