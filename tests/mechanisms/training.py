"""A few steps of the reference on simulated ranks, by its public names, and all that they give back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.impl.clipping.batch_layout import DISTRIBUTED, Layouts
from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.sharding.protocol import Sharded
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer

BOOKKEEPING = Mode(passes="bookkeeping")
Rows = Sequence[Sequence[int]]
"""The samples of a rank's micro-batches."""


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With parameters that are the same on all ranks, and no zeros among them."""
    module = module.to(dtype)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = numbers(*parameter.shape, seed=seed).to(dtype)
    return module


def two_layers() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b]: half of the squared error of each sample."""
    return 0.5 * (outputs - targets).flatten(1).square().sum(1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0.25, foreach=False)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.5, foreach=False)


def private(clip_norm: float = 0.5, mode: Mode = BOOKKEEPING, noise: float = 0.0, **more: Any) -> Privacy:
    return Privacy(Flat(clip_norm), mode, noise_multiplier=noise, noise=gaussian.seeded(7), **more)


def flat(module: nn.Module, **more: Any) -> Sharded:
    return ShardedModel(module, ["0"], collectives.axis(), reshard_after_forward=True, **more)


def per_parameter(module: nn.Module, **more: Any) -> Sharded:
    return PerParameterModel(module, ["0"], init_device_mesh("cpu", (collectives.axis().size,)), True, **more)


def replicated(replicas: int, shards: int, **more: Any) -> Callable[[nn.Module], Sharded]:
    def way(module: nn.Module) -> Sharded:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        shard, replicate = (collectives.axis(mesh.get_group(name)) for name in ("shard", "replicate"))
        return ShardedModel(module, ["0"], shard, True, replicate, **more)

    return way


@dataclass(frozen=True)
class Setting:
    """``rows``: of each rank, by step all the same; their number is that of the ranks."""

    rows: Sequence[Rows] = ([[0, 1, 2, 3]],)
    model: Callable[[], nn.Module] = two_layers
    x: Tensor = field(default_factory=lambda: numbers(4, 3, seed=20))
    y: Tensor = field(default_factory=lambda: numbers(4, 2, seed=21))
    way: Callable[[nn.Module], Sharded] = flat
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    privacy: Privacy | None = None
    max_grad_norm: float | None = None
    sync_every: bool = True
    layout: Layouts = DISTRIBUTED
    steps: int = 1
    loss: Callable[[Tensor, Tensor], Tensor] = loss

    def trainer(self) -> Trainer:
        options = Options(4.0, self.layout, self.privacy, self.max_grad_norm, self.sync_every)
        return Trainer(self.way(self.model()), self.loss, self.optimizer, options)

    def batches(self, rank: int) -> list[MicroBatch]:
        return [MicroBatch(self.x[list(rows)], self.y[list(rows)], rows) for rows in self.rows[rank]]

    def __call__(self, rank: int) -> dict[str, Any]:
        """What all steps leave on a rank."""
        trainer = self.trainer()
        for _ in range(self.steps):
            trainer.step(self.batches(rank))
        return seen(trainer)


def seen(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {"gradients": trainer.model.full_gradients(), "parameters": trainer.model.full_values()}
    found["grad_norm"] = trainer.grad_norm
    if trainer.private is not None:
        found |= {"norms": trainer.found.norms, "factors": trainer.found.factors}
    return found


def told(value: Any) -> str:
    """Any nested data as text that tells all bits."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.detach().tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {told(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(told, value)) + "]"
    return repr(value)
