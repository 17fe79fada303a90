"""Implementations that refuse: on every rank, on one alone, some batches, some batches while they get others wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Features, Setup

_REFUSED_FROM = 4


class Replicas:
    """Plain data parallelism; ``off`` is what it adds to every gradient."""

    def __init__(self, model: nn.Module, setup: Setup, kind: str) -> None:
        self.model, self.setup, self.kind = model, setup, kind
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        size = torch.tensor(float(batch.size))
        dist.all_reduce(size)
        self._refuse(int(size))
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.setup.world_size).add_(self.kind == "some, and wrong")
        self.optimizer.step()

    def _refuse(self, size: int) -> None:
        if self.kind == "one rank" and self.setup.rank:
            raise NotImplementedError("rank 1 cannot")
        if self.kind == "every rank" or (self.kind.startswith("some") and size >= _REFUSED_FROM):
            raise NotImplementedError("a layer of this kind cannot be taken")
        if self.kind == "two errors":
            raise (RuntimeError if self.setup.rank else NotImplementedError)("a layer of this kind cannot be taken")
        if self.kind == "another error":
            raise RuntimeError("a layer of this kind cannot be taken")

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Refusing:
    features = Features(
        promises=frozenset({"plain"}),
        accepts=frozenset({"bias", "ragged", "root-parameters", "rows<ranks", "uneven-rows"}),
    )

    def __init__(self, kind: str) -> None:
        self.name = self.kind = kind

    def build(self, model: nn.Module, setup: Setup) -> Replicas:
        return Replicas(model, setup, self.kind)


every_rank, one_rank = Refusing("every rank"), Refusing("one rank")
another_error, two_errors = Refusing("another error"), Refusing("two errors")
some, some_and_wrong = Refusing("some"), Refusing("some, and wrong")
