"""Plain training that is right: every rank has all parameters, gradients are averaged. Other toys are built on it."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Features, Setup


class Trainer:
    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        self.average()
        self.optimizer.step()

    def average(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Averaging:
    """An adapter of one kind of trainer."""

    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias"}))

    def __init__(self, name: str, trainer: type[Trainer] = Trainer) -> None:
        self.name, self._trainer = name, trainer

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        return self._trainer(model, setup)
