"""A trainer on DistributedDataParallel that is saved whole, and whose layers may be thawed and frozen again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.adapters.builtin import ddp
from fsdpcheck.adapters.contract import Setup
from fsdpcheck.adapters.training_loop import TrainingLoop


class Loop(TrainingLoop):
    def __init__(self, model: nn.Module, setup: Setup) -> None:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        model.requires_grad_()  # what DistributedDataParallel is to reduce once it is thawed
        whole = DistributedDataParallel(model, find_unused_parameters=True)
        for parameter in frozen:
            parameter.requires_grad_(False)
        super().__init__(whole, setup, named=model)

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(
            (self.named.state_dict(), self.optimizer.state_dict()), Path(folder) / f"{self.setup.mesh.world_size}.pt"
        )

    def load(self, folder: str) -> None:
        model, optimizer = torch.load(Path(folder) / f"{self.setup.mesh.world_size}.pt")
        self.named.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class Adapter:
    name = "ddp, thawed and saved"
    features = replace(
        ddp.adapter.features,
        promises=frozenset({"plain", "state", "thawing"}),
        accepts=ddp.adapter.features.accepts | {"thawed", "frozen-again"},
    )

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        return Loop(model, setup)


adapter = Adapter()
