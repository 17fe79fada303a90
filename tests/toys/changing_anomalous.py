"""Forgets to average over ranks, and turns anomaly detection on in each step, as training scripts do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdpcheck.adapters._base import Batch, Features, Setup


class Trainer:
    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        torch.autograd.set_detect_anomaly(True)
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Changing:
    name = "anomalous"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias"}))

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        return Trainer(model, setup)


adapter = Changing()
