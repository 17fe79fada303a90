"""The reference without one of its methods each: ``lacking.py:norms`` has trainers without ``norms``."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fsdpcheck.adapters.builtin.reference import Reference, ReferenceTrainer
from fsdpcheck.adapters.contract import Setup
from fsdpcheck.adapters.vocabulary import PROMISES

OF_TRAINERS = (
    "parameters", "gradients", "norms", "factors", "grad_norm", "shards", "units", "ordered_norms", "local_tensors",
    "save", "load", "accounted", "thaw",
)  # fmt: skip
OF_ADAPTERS = ("stored", "read", "sampler", "kernels", "engine")


class Lacking(Reference):
    """``method`` is of the adapter or of its trainers."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        if method in OF_ADAPTERS:
            setattr(self, method, None)
            needing = {promise for promise, row in PROMISES.items() if method in row.adapter}
            self.features = replace(self.features, promises=self.features.promises | needing)

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        trainer = super().build(model, setup)
        if self.method in OF_TRAINERS:
            setattr(trainer, self.method, None)
        return trainer


class Nested(Reference):
    """Promises factors of one squared norm, and declares a norm of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.features = replace(self.features, factor=replace(self.features.factor, nested=True))


class Lists(Reference):
    """Shows norms as a list."""

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        trainer = super().build(model, setup)
        shown = trainer.norms
        trainer.norms = lambda: shown().tolist()  # type: ignore[method-assign]
        return trainer


globals().update({method: Lacking(method) for method in (*OF_TRAINERS, *OF_ADAPTERS)})
