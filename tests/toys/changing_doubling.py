"""Registers a hook on all modules when it is imported: what each Linear gives is doubled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters._base import Batch, Features, Setup

torch.nn.modules.module.register_module_forward_hook(
    lambda module, _, given: given * 2 if isinstance(module, torch.nn.Linear) else None
)


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
    name = "doubling"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias"}))

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        return Trainer(model, setup)


adapter = Changing()
