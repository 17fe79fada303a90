"""The reference, stopped before every step but the first: saved, built anew the other way of sharding, and loaded."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.builtin.reference import Reference, ReferenceTrainer
from fsdpcheck.adapters.builtin.reference_fsdp2 import ReferenceFsdp2
from fsdpcheck.adapters.contract import Batch, Setup

WAYS = [Reference(), ReferenceFsdp2()]


class Resumed:
    """Takes each step with a new trainer, which has its state from files that the last one wrote."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self._model, self._setup, self._steps = copy.deepcopy(model), setup, 0
        self._trainer = WAYS[0].build(model, setup)

    def step(self, batch: Batch) -> None:
        if self._steps:
            self._trainer = self._resumed(WAYS[self._steps % 2].build(copy.deepcopy(self._model), self._setup))
        self._trainer.step(batch)
        self._steps += 1

    def parameters(self) -> dict[str, Tensor]:
        return self._trainer.parameters()

    def gradients(self) -> dict[str, Tensor]:
        return self._trainer.gradients()

    def local_tensors(self) -> list[Tensor]:
        return self._trainer.local_tensors()

    def _resumed(self, trainer: ReferenceTrainer) -> ReferenceTrainer:
        from fsdpcheck.impl import state

        folder: list[Any] = [tempfile.mkdtemp() if self._setup.rank == 0 else None]
        dist.broadcast_object_list(folder)
        state.save(folder[0], self._trainer.impl.model, self._trainer.impl.optimizer)
        state.load(folder[0], trainer.impl.model, trainer.impl.optimizer)
        if self._setup.rank == 0:  # all have read: a load ends with a collective
            shutil.rmtree(folder[0])
        return trainer


class Resuming(Reference):
    """Builds trainers that stop and resume; promises what needs no private observables."""

    name = "resuming"

    def build(self, model: nn.Module, setup: Setup) -> Any:
        return Resumed(model, setup)


class Keeping(ReferenceTrainer):
    """Saves after each step, to a folder of that number."""

    folder: Path
    steps = 0

    def step(self, batch: Batch) -> None:
        from fsdpcheck.impl import state

        super().step(batch)
        self.steps += 1
        state.save(self.folder / str(self.steps), self.impl.model, self.impl.optimizer)


class Keeper(Reference):
    """The reference, which keeps checkpoints in ``folder``."""

    name = "keeper"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        trainer = Keeping(self.shard(model, setup), setup, self.mode, self.nonfinite)
        trainer.folder = self.folder
        return trainer


adapter = Resuming()
