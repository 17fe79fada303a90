"""Optimizers of a small training repository (own_parts.py), right or wrong."""

from __future__ import annotations

from typing import Any

import own_parts
import torch
import torch.distributed as dist
from torch import Tensor, nn


def parallelize(model: nn.Sequential, mesh: Any) -> nn.Module:
    return own_parts.parallelize(model, mesh)


def build() -> nn.Sequential:
    """The first layer's bias is frozen."""
    model = own_parts.build()
    model[0].bias.requires_grad_(False)
    return model


def batch(n: int) -> tuple[Tensor, Tensor]:
    return own_parts.batch(n)


def step(model: nn.Module, optimizers: Any, batches: Any, loss: Any) -> None:
    """Of a list of optimizers."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()
    for optimizer in optimizers:
        optimizer.step()


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for weights, none for biases, and no frozen parameter."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    weights = [value for name, value in trained if name.endswith("weight")]
    others = [value for name, value in trained if not name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    weights = [value for name, value in model.named_parameters() if name.endswith("weight")]
    others = [value for name, value in model.named_parameters() if not name.endswith("weight")]
    return [torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)]


class Container:
    """As torchtitan has one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def container(model: nn.Module) -> Container:
    return Container(several(model))


def own_part_only(model: nn.Module) -> torch.optim.Optimizer:
    """Each rank updates the parameters that ZeRO-1 would give it, and nobody sends the others."""
    alone = not dist.is_initialized()
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    return torch.optim.SGD(list(model.parameters())[rank::world], lr=0.1)


def decay_by_shard(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay where the rank's own part has more than four elements, in place of the whole."""
    sizes = [(value.to_local() if hasattr(value, "to_local") else value).numel() for value in model.parameters()]
    own = list(zip(model.parameters(), sizes, strict=True))
    decayed, others = ([value for value, size in own if (size > 4) == large] for large in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def nothing(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1)


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(build().parameters(), lr=0.1)


def raises(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=-1.0)


def at_rest(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def freezes(model: nn.Module) -> torch.optim.Optimizer:
    next(model.parameters()).requires_grad_(False)
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad = value.grad / value.grad.norm()
        super().step()


def normed(model: nn.Module) -> torch.optim.Optimizer:
    return Normed(model.parameters(), lr=0.1)


class ByPlaces(torch.optim.SGD):
    """Has another rate for each place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.grad *= torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
        super().step()


def by_places(model: nn.Module) -> torch.optim.Optimizer:
    return ByPlaces(model.parameters(), lr=0.1)


class Dithered(torch.optim.SGD):
    """Rounds at random."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for value in group["params"]:
                    value += torch.rand(value.shape, dtype=value.dtype) * 1e-9


def dithered(model: nn.Module) -> torch.optim.Optimizer:
    return Dithered(model.parameters(), lr=0.1)
