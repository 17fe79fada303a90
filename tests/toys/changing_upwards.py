"""Replaces SGD.step when it is imported by one that goes up instead of down."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters._base import Batch, Features, Setup


@torch.no_grad()
def _up(self: Any, closure: object = None) -> None:
    for group in self.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=group["lr"])


torch.optim.SGD.step = _up  # type: ignore[method-assign,assignment]


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
    name = "upwards"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias"}))

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        return Trainer(model, setup)


adapter = Changing()
