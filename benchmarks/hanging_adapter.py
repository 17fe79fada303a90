"""A user's adapter with a collective under ``if rank == 0``: data-parallel SGD that logs a sum on one rank only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapter import Batch, Features, Setup


class _Trainer:
    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            torch.autograd.backward(losses.sum() * batch.loss_scale)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.setup.world_size)
        if self.setup.rank == 0:
            dist.all_reduce(torch.ones(1))  # the planted bug: the other ranks never come
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class RankZeroLogs:
    """Promises plain training; hangs from two ranks on."""

    name = "rank zero logs"
    features = Features(promises=frozenset({"plain"}))

    def build(self, model: nn.Module, setup: Setup) -> _Trainer:
        return _Trainer(model, setup)


adapter = RankZeroLogs()
