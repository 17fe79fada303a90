"""Sharded training whose optimizer is given what a rank has: right for whatever updates element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdpcheck.adapter import Batch, Setup, TrainingLoop, mesh_of
from fsdpcheck.adapters.builtin.fully_shard import adapter as right


class Local(TrainingLoop):
    """Its optimizer has the ranks' shards; ``flat``: as one dimension."""

    def __init__(self, model: nn.Module, setup: Setup, flat: bool) -> None:
        self._sharded: list[Any] = [value for value in model.parameters() if value.requires_grad]
        self._flat = flat
        self._own = [nn.Parameter(self._of(value)) for value in self._sharded]
        super().__init__(model, setup, optimizer=setup.optimizer(self._own))

    def _of(self, value: Any) -> Any:
        local = value.detach().to_local()
        return local.view(-1) if self._flat else local

    def accumulate(self, batch: Batch) -> None:
        for value in self._sharded:
            value.grad = None
        super().accumulate(batch)
        for value, own in zip(self._sharded, self._own, strict=True):
            own.grad = None if value.grad is None else self._of(value.grad)


class Adapter:
    features = replace(
        right.features,
        promises=frozenset({"plain"}),
        accepts=right.features.accepts - {"hsdp", "parameter-groups", "bfloat16", "tf32"},
        observables=frozenset({"params", "grads"}),
    )

    def __init__(self, name: str, flat: bool) -> None:
        self.name, self._flat = name, flat

    def build(self, model: nn.Module, setup: Setup) -> Local:
        mesh = mesh_of(setup)
        for name in [name for unit in setup.units for name in unit]:
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Local(model, setup, self._flat)


blocks = Adapter("an optimizer of blocks", flat=False)
pieces = Adapter("an optimizer of pieces", flat=True)
