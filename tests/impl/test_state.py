"""Checkpoints: what is saved at W ranks one way is what is loaded at W' ranks another way, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.adapters._gather import local_tensors
from fsdpcheck.impl import collectives, optimizer_state, state
from fsdpcheck.impl.per_parameter import PerParameterModel
from fsdpcheck.impl.sharded import Sharded
from fsdpcheck.impl.spans import Span
from fsdpcheck.impl.step import MicroBatch, Options, Trainer
from fsdpcheck.impl.wrap import ShardedModel

if TYPE_CHECKING:
    from .conftest import Ranks

UNITS = ["units.0", "units.1"]
WORLDS = [1, 2, 3, 4]
ROWS = {1: [4], 2: [3, 1], 3: [2, 0, 2], 4: [1, 0, 3, 0]}
"""Samples of each rank, by world size; four in all."""


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


class Net(nn.Module):
    """A tied weight, frozen parameters, a head of one row, a buffer that is saved and one that is not."""

    scale: Tensor

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        tied = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.5), nn.Linear(3, 3))
        self.units = nn.ModuleList([tied, nn.Linear(3, hidden)])
        self.head = nn.Linear(hidden, 1)
        tied[2].weight = tied[0].weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.double()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = integers(*parameter.shape, seed=seed)
        self.units[1].weight.requires_grad_(False)  # type: ignore[union-attr]
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        head: Tensor = self.head(x * self.scale)
        return head


def flat(module: nn.Module) -> Sharded:
    return ShardedModel(module, UNITS, collectives.axis(), reshard_after_forward=True)


def per_parameter(module: nn.Module) -> Sharded:
    return PerParameterModel(module, UNITS, init_device_mesh("cpu", (collectives.axis().size,)), True)


def replicated_flat(module: nn.Module) -> Sharded:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, replicate = (collectives.axis(mesh.get_group(name)) for name in ("shard", "replicate"))
    return ShardedModel(module, UNITS, shard, True, replicate)


def replicated_per_parameter(module: nn.Module) -> Sharded:
    return PerParameterModel(module, UNITS, init_device_mesh("cpu", (2, 2)), True)


Way = Callable[[nn.Module], Sharded]
WAYS: dict[str, Way] = {"flat": flat, "per-parameter": per_parameter}
COMBINED = [(way, world) for way in WAYS for world in WORLDS]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.5, weight_decay=0.5, foreach=False),
    "adam": partial(torch.optim.Adam, lr=0.5, amsgrad=True, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=0.5, weight_decay=0.25, foreach=False),
}


class Counters:
    """Replicated state like that of a noise generator."""

    def __init__(self, seed: int, step: int) -> None:
        self.seed, self.step = seed, step

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed, self.step = state_dict["seed"], state_dict["step"]


class Training:
    """A trainer with a schedule and counters, on this rank's share of four samples."""

    def __init__(self, way: Way, kind: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        loss = lambda outputs, targets: 0.5 * (outputs - targets).square().sum(1)  # noqa: E731
        self.trainer = Trainer(way(Net()), loss, OPTIMIZERS[kind], Options(normaliser=2))
        self.model = self.trainer.model
        assert self.trainer.optimizer is not None
        self.optimizer = self.trainer.optimizer
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.75)
        self.noise = Counters(seed=7, step=0)
        self.extra: dict[str, state.Stateful] = {"schedule": self.schedule, "noise": self.noise}

    def step(self) -> dict[str, Any]:
        """One step, what it left, and weights back to small integers, so that the next one is exact again."""
        start = sum(ROWS[self.world_size][: self.rank])
        rows = list(range(start, start + ROWS[self.world_size][self.rank]))
        x = integers(4, 3, seed=self.noise.step)[rows]
        self.trainer.step([MicroBatch(x, torch.zeros(len(rows), 1).double(), rows)])
        self.schedule.step()
        self.noise.step += 1
        found = seen(self.model, self.optimizer)
        for tensor in local_tensors(self.model.shards()):
            tensor.round_().clamp_(-2, 2)
        return found

    def save(self, folder: Path) -> None:
        state.save(folder, self.model, self.optimizer, self.extra)

    def load(self, folder: Path) -> None:
        state.load(folder, self.model, self.optimizer, self.extra)

    def scramble(self) -> None:
        """Everything that loading must bring back, wrong; padding stays."""
        for shard in [*self.model.shards(), *self.model.frozen_shards()]:
            for span in self.model.cut(shard, shard.detach()).values():
                span.value.fill_(-77)
        self.model.module.scale.fill_(-77)  # type: ignore[operator, union-attr]


def seen(model: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's spans of model and optimizer, copied, and the optimizer's plain state."""
    spans = state.sharded_state_dict(model) | optimizer_state.spans(model, optimizer)
    described = optimizer_state.describe(model, optimizer)
    return {
        "spans": {n: Span(s.shape, s.start, s.value.clone(), s.writes) for n, s in spans.items()},
        "plain": copy.deepcopy([described.elementwise, described.scalars, described.hyperparameters]),
    }


def whole(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole tensors as bytes, from what each rank saw, and plain state, which all must hold alike."""
    found: dict[str, Any] = {}
    for name, first in of_ranks[0]["spans"].items():
        parts = sorted(
            (s.start, s.stop, s.value) for s in (r["spans"][name] for r in of_ranks) if s.writes and s.value.numel()
        )
        assert [start for start, _, _ in parts] + [first.shape.numel()] == [0] + [stop for _, stop, _ in parts], name
        found[name] = torch.cat([first.value[:0], *(value for _, _, value in parts)]).numpy().tobytes()
    for other in of_ranks[1:]:
        assert not state.plain.difference(of_ranks[0]["plain"], other["plain"])
    return found | {"plain": of_ranks[0]["plain"]}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert state.plain.difference(got, wanted) == ""


def saves(ranks: Ranks, folder: Path, way: str, world_size: int, kind: str = "adam") -> dict[str, Any]:
    """Two steps, then a checkpoint in ``folder``; what was saved."""

    def body(rank: int) -> dict[str, Any]:
        training = Training(WAYS[way], kind, rank, world_size)
        training.step()
        training.step()
        training.save(folder)
        return seen(training.model, training.optimizer)

    return whole(ranks(body, world_size))


def loads(ranks: Ranks, folder: Path, way: str, world_size: int, kind: str = "adam") -> dict[str, Any]:
    """What a new, scrambled training holds after loading."""

    def body(rank: int) -> dict[str, Any]:
        training = Training(WAYS[way], kind, rank, world_size)
        training.scramble()
        training.load(folder)
        assert paddings(training) == set()
        return seen(training.model, training.optimizer) | {"extra": (training.noise.step, training.schedule.last_epoch)}

    of_ranks = ranks(body, world_size)
    assert {found["extra"] for found in of_ranks} == {(2, 2)}
    return whole(of_ranks)


def paddings(training: Training) -> set[float]:
    """Values other than zero in padding of shards and of their moments."""
    if not isinstance(training.model, ShardedModel):
        return set()
    found = []
    for buffer in (buffer for unit in training.model.units for buffer in unit.buffers):
        moments = [value for value in training.optimizer.state.get(buffer.shard, {}).values() if value.dim()]
        found += [tensor.detach()[buffer.padding] for tensor in [buffer.shard, *moments]]
    return set(torch.cat(found).tolist()) - {0.0}


Saved = dict[tuple[str, int], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint by each way at each world size."""
    found = {}
    for way, world_size in COMBINED:
        folder = tmp_path_factory.mktemp(f"{way}-{world_size}")
        found[way, world_size] = folder, saves(ranks, folder, way, world_size)
    return found


@pytest.mark.parametrize(("saver", "before"), COMBINED)
@pytest.mark.parametrize(("loader", "after"), COMBINED)
def test_saved_one_way_and_loaded_another(
    ranks: Ranks, saved: Saved, saver: str, before: int, loader: str, after: int
) -> None:
    folder, wanted = saved[saver, before]
    assert_same(loads(ranks, folder, loader, after), wanted)


def test_all_ways_saved_the_same(saved: Saved) -> None:
    first = saved["flat", 1][1]
    assert {name for name in first if name.endswith("max_exp_avg_sq")}
    for _, found in saved.values():
        assert_same(found, first)


def reference(ranks: Ranks, kind: str, steps: int) -> list[dict[str, Any]]:
    def body(rank: int) -> list[dict[str, Any]]:
        training = Training(flat, kind, rank, 1)
        return [training.step() for _ in range(steps)]

    return [whole([found]) for found in ranks(body, 1)[0]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("ways", [("flat",) * 3, ("per-parameter",) * 3, ("flat", "per-parameter", "flat")])
def test_stopped_twice_equals_never_stopped(ranks: Ranks, tmp_path: Path, kind: str, ways: tuple[str, ...]) -> None:
    assert resumed(ranks, tmp_path, kind, ways) == ""


def resumed(ranks: Ranks, tmp_path: Path, kind: str, ways: tuple[str, ...]) -> str:
    """Where six steps at 4, 3 and 1 ranks first differ from six steps at one."""
    got: list[dict[str, Any]] = []
    for part, (way, world_size) in enumerate(zip(ways, (4, 3, 1), strict=True)):

        def body(rank: int, part: int = part, way: str = way, world_size: int = world_size) -> list[dict[str, Any]]:
            training = Training(WAYS[way], kind, rank, world_size)
            if part:
                training.load(tmp_path / str(part))
            found = [training.step(), training.step()]
            training.save(tmp_path / str(part + 1))
            return found

        of_ranks = ranks(body, world_size)
        got += [whole([found[step] for found in of_ranks]) for step in range(2)]
    wanted = reference(ranks, kind, 6)
    assert len({found["head.weight"] for found in wanted}) > 3, "the weights hardly move"
    return state.plain.difference(got, wanted)
