"""The built-in adapters without ``local_tensors``: the harness knows what the optimizers it made update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Adapter, Setup, Trainer


class _Hidden:
    """A trainer, but for ``local_tensors``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name == "local_tensors":
            raise AttributeError(name)
        return getattr(self._trainer, name)


class _Without:
    def __init__(self, name: str) -> None:
        self._adapter: Adapter = adapters.load(name)
        self.name = f"{name} without local_tensors"
        self.features = replace(self._adapter.features, promises=frozenset({"plain"}))

    def build(self, model: nn.Module, setup: Setup) -> Any:
        return _Hidden(self._adapter.build(model, setup))


reference, reference_fsdp2 = _Without("reference"), _Without("reference_fsdp2")
fully_shard, fsdp1 = _Without("fully_shard"), _Without("fsdp1")
