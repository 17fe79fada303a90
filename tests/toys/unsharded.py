"""A toy implementation, right on one rank alone: ``unsharded.py:adapter`` on the command line."""

from __future__ import annotations

from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Features, Setup


class Unsharded:
    """The whole model on every rank; right for one rank, wrong for more."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Toy:
    name = "toy"
    features = Features(
        promises=frozenset({"plain"}),
        accepts=frozenset({"ragged", "empty-rank", "rows<ranks", "uneven-rows", "root-parameters"}),
        reasons={"private": "a toy has no secrets"},
    )

    def build(self, model: nn.Module, setup: Setup) -> Unsharded:
        return Unsharded(model, setup)


adapter = Toy()
