"""A small training with everything that a checkpoint must bring back; for tests of saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.adapters.training_loop import local
from fsdpcheck.impl import state
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded
from fsdpcheck.impl.sharding.spans import Span
from fsdpcheck.impl.state import optimizer_state, plain_data
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer

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
    return PerParameterModel(
        module, UNITS, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), True
    )


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
    """A trainer with a schedule and noise, on this rank's share of four samples."""

    def __init__(self, way: Way, kind: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        loss = lambda outputs, targets: 0.5 * (outputs - targets).square().sum(1)  # noqa: E731
        self.noise = Counters(seed=7, step=0)
        notify = {"before_step": self.add_noise}
        self.trainer = Trainer(
            way(Net()),
            loss,
            OPTIMIZERS[kind],
            Options(normaliser=2),
            notify=lambda moment: notify.get(moment, lambda: None)(),
        )
        self.model = self.trainer.model
        assert self.trainer.optimizer is not None
        self.optimizer = self.trainer.optimizer
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.75)
        self.extra: dict[str, state.Stateful] = {"schedule": self.schedule, "noise": self.noise}

    def add_noise(self) -> None:
        """To the reduced gradients, as the counters say."""
        gaussian.seeded(self.noise.seed).add_(self.model.pieces(), self.noise.step, 0.5)

    def step(self) -> dict[str, Any]:
        """One step, what it left, and weights back to small integers, so that the next one is exact again."""
        start = sum(ROWS[self.world_size][: self.rank])
        rows = list(range(start, start + ROWS[self.world_size][self.rank]))
        x = integers(4, 3, seed=self.noise.step)[rows]
        self.trainer.step([MicroBatch(x, torch.zeros(len(rows), 1).double(), rows)])
        self.schedule.step()
        self.noise.step += 1
        found = seen(self.model, self.optimizer)
        for tensor in map(local, self.model.shards()):
            tensor.round_().clamp_(-2, 2)
        return found

    def save(self, folder: Path) -> None:
        state.save(folder, self.model, self.optimizer, self.extra)

    def load(self, folder: Path) -> None:
        self.noise.seed = 0
        state.load(folder, self.model, self.optimizer, self.extra)

    def scramble(self) -> None:
        """Everything that loading must bring back, wrong; padding stays."""
        for shard in [*self.model.shards(), *self.model.frozen_shards()]:
            for span in self.model.cut(shard, shard.detach()).values():
                span.value.fill_(-77)
        self.model.module.scale.fill_(-77)  # type: ignore[operator, union-attr]


def seen(model: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's spans of model and optimizer, copied, whole parameters gathered, the optimizer's plain state."""
    spans = state.sharded_state_dict(model) | optimizer_state.spans(model, optimizer)
    described = optimizer_state.describe(model, optimizer)
    return {
        "spans": {n: Span(s.shape, s.start, s.value.clone(), s.writes) for n, s in spans.items()},
        "values": model.full_values(),
        "plain": copy.deepcopy([described.elementwise, described.scalars, described.hyperparameters]),
    }


def whole(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole tensors as bytes, from what each rank saw, and plain state, which all must hold alike.

    Spans tile each tensor, and those of parameters hold what gathering them shows.
    """
    found: dict[str, Any] = {}
    for name, first in of_ranks[0]["spans"].items():
        parts = sorted(
            (s.start, s.stop, s.value) for s in (r["spans"][name] for r in of_ranks) if s.writes and s.value.numel()
        )
        assert [start for start, _, _ in parts] + [first.shape.numel()] == [0] + [stop for _, stop, _ in parts], name
        found[name] = torch.cat([first.value[:0], *(value for _, _, value in parts)]).numpy().tobytes()
    for name, value in of_ranks[0]["values"].items():
        assert found[name] == value.numpy().tobytes(), name
    for other in of_ranks[1:]:
        assert not plain_data.difference(of_ranks[0]["plain"], other["plain"])
    return found | {"plain": of_ranks[0]["plain"]}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = plain_data.difference(got, wanted)
    assert not different, different


def paddings(training: Training) -> set[float]:
    """Values other than zero in padding of shards and of their moments."""
    if not isinstance(training.model, ShardedModel):
        return set()
    found = []
    for buffer in (buffer for unit in training.model.units for buffer in unit.buffers):
        moments = [value for value in training.optimizer.state.get(buffer.shard, {}).values() if value.dim()]
        found += [tensor.detach()[buffer.padding] for tensor in [buffer.shard, *moments]]
    return set(torch.cat(found).tolist()) - {0.0}


def sharded(module: nn.Module | None = None) -> ShardedModel:
    return ShardedModel(Net() if module is None else module, UNITS, collectives.axis(), True)


def adam(model: ShardedModel) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.shards(), foreach=False)


def stepped(model: ShardedModel) -> torch.optim.Optimizer:
    optimizer = adam(model)
    for shard in model.shards():
        shard.grad = torch.ones_like(shard)
    optimizer.step()
    return optimizer


def groups_apart(model: ShardedModel) -> torch.optim.Optimizer:
    first, *rest = model.shards()
    return torch.optim.Adam([{"params": [first], "lr": 0.5}, {"params": rest}], foreach=False)


def values(found: dict[str, Any]) -> dict[str, Any]:
    """Spans and plain state of one rank."""
    return {name: span.value for name, span in found["spans"].items()} | {"plain": found["plain"]}
