"""What the attacks share: right data parallelism and right per-sample clipping, in pieces that can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapter import Batch, Features, Promise, Setup, Trait

ACCEPTS: frozenset[Trait] = frozenset(
    {"bias", "ragged", "micro-batches", "uneven-rows", "empty-rank", "float32", "momentum", "real"}
)


class Plain:
    """Data parallelism: whole parameters on every rank, gradients summed over ranks and divided by their number."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.optimizer = setup.optimizer(list(self.trained.values()))
        self.shown: dict[str, Tensor] = {}
        self.steps = 0

    @property
    def rank(self) -> int:
        return self.setup.rank

    @property
    def world(self) -> int:
        return self.setup.world_size

    def step(self, batch: Batch) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        self.backward(batch)
        self.reduce()
        self.shown = {name: self.grad(value).clone() for name, value in self.trained.items()}
        self.optimizer.step()

    def backward(self, batch: Batch) -> None:
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        for value in self.trained.values():
            if value.grad is None:
                value.grad = torch.zeros_like(value)

    def reduce(self) -> None:
        for name, value in self.trained.items():
            self.average(name, self.grad(value))

    def average(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad /= self.world

    @staticmethod
    def grad(value: nn.Parameter) -> Tensor:
        assert value.grad is not None
        return value.grad

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.shown.items()}


class Private(Plain):
    """Per-sample clipping, one backward a sample, then data parallelism."""

    def backward(self, batch: Batch) -> None:
        names = list(self.trained)
        sums = {name: torch.zeros_like(value) for name, value in self.trained.items()}
        squares: list[Tensor] = []
        weights: list[Tensor] = []
        for micro in batch.micro_batches:
            for i in range(len(micro.inputs)):
                grads = self.sample(micro.inputs[i : i + 1], micro.targets[i : i + 1])
                square = torch.stack([(grads[name] * grads[name]).sum() for name in names]).sum()
                weight = self.weight(square, grads)
                for name in names:
                    sums[name] += weight * grads[name]
                squares.append(square)
                weights.append(weight)
        empty = next(iter(self.trained.values())).new_zeros(0)
        self.last_norms = torch.stack(squares).sqrt() if squares else empty
        self.last_factors = torch.stack(weights) if weights else empty
        for name, value in self.trained.items():
            value.grad = sums[name] * batch.loss_scale

    def sample(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = self.setup.loss(self.model(inputs), targets).sum()
        grads = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
        pairs = zip(self.trained.items(), grads, strict=True)
        return {name: torch.zeros_like(value) if grad is None else grad for (name, value), grad in pairs}

    def weight(self, square: Tensor, grads: dict[str, Tensor]) -> Tensor:
        clip = torch.full_like(square, self.setup.clip_norm)
        return (clip / square.sqrt()).clamp(max=1.0)

    def norms(self) -> Tensor:
        return self.last_norms.clone()

    def factors(self) -> Tensor:
        return self.last_factors.clone()


@dataclass(frozen=True)
class Adapter:
    """An adapter of one trainer class."""

    name: str
    trainer: Callable[[nn.Module, Setup], Any]
    features: Features

    def build(self, model: nn.Module, setup: Setup) -> Any:
        return self.trainer(model, setup)


def plain(
    name: str,
    trainer: Callable[[nn.Module, Setup], Any],
    *more: Promise,
    accepts: frozenset[Trait] = ACCEPTS,
    grads: bool = True,
) -> Adapter:
    """An adapter that promises plain training, and ``more``."""
    promises: frozenset[Promise] = frozenset({"plain", *more})
    if grads:
        features = Features(promises=promises, accepts=accepts, observables=frozenset({"params", "grads"}))
    else:
        features = Features(promises=promises, accepts=accepts, observables=frozenset({"params"}))
    return Adapter(name, trainer, features)


def private(name: str, trainer: Callable[[nn.Module, Setup], Any]) -> Adapter:
    """An adapter that promises per-sample clipping with exact factors."""
    promises: frozenset[Promise] = frozenset({"private", "exact-factors"})
    features = Features(
        promises=promises,
        accepts=frozenset({"bias", "ragged", "micro-batches", "uneven-rows"}),
        observables=frozenset({"params", "grads", "norms", "factors"}),
    )
    return Adapter(name, trainer, features)
