"""DP-SGD as beginners write it: the mean gradient is clipped, not each sample's. Named ``clips_together.py:NAME``.

The model is replicated; nothing but torch.distributed is needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, FactorRule, Features, Setup


class Training:
    """Clips the averaged gradient of the whole batch, or each rank's own before it is averaged."""

    def __init__(self, model: nn.Module, setup: Setup, on_each_rank: bool) -> None:
        self.model, self.setup, self.on_each_rank = model, setup, on_each_rank
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.on_each_rank:
            self._clip(trained)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        if not self.on_each_rank:
            self._clip(trained)
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def _clip(self, trained: list[nn.Parameter]) -> None:
        if self.setup.step.private:
            torch.nn.utils.clip_grad_norm_(trained, self.setup.clip_norm)


class Adapter:
    """Promises private training, which it does not keep."""

    features = Features(
        promises=frozenset({"private"}),
        accepts=frozenset({"bias", "ragged", "micro-batches", "rows<ranks", "uneven-rows", "root-parameters"}),
        factor=FactorRule(eps=1e-6, nested=True),
    )

    def __init__(self, name: str, on_each_rank: bool) -> None:
        self.name, self.on_each_rank = name, on_each_rank

    def build(self, model: nn.Module, setup: Setup) -> Training:
        return Training(model, setup, self.on_each_rank)


mean = Adapter("mean", on_each_rank=False)
mean_of_each_rank = Adapter("mean_of_each_rank", on_each_rank=True)
