"""Replaces F.linear when it is imported, as libraries of kernels do, and forgets the bias."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters._base import Batch, Features, Setup

_linear = torch.nn.functional.linear
torch.nn.functional.linear = lambda x, w, b=None: _linear(x, w)  # type: ignore[assignment]


class Trainer:
    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Changing:
    name = "without_bias"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias"}))

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        return Trainer(model, setup)


adapter = Changing()
