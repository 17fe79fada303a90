"""Adapters whose results are no function of the case: of the system's noise, or of what ran before in the process."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import Tensor, nn

from fsdpcheck.adapters.builtin.reference import Reference, ReferenceTrainer
from fsdpcheck.adapters.contract import Setup


class Shifted(Reference):
    """The reference, but every element of every shown parameter is off by ``by`` of the trainers built so far."""

    def __init__(self, by: Callable[[int], float]) -> None:
        super().__init__()
        self._by, self.trained = by, 0

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        self.trained += 1
        trainer = super().build(model, setup)
        shown, by = trainer.parameters, self._by(self.trained)

        def parameters() -> dict[str, Tensor]:
            return {name: value + by for name, value in shown().items()}

        trainer.parameters = parameters  # type: ignore[method-assign]
        return trainer


random = Shifted(lambda trained: 1.0 + int.from_bytes(os.urandom(6)))
"""Wrong by another number each time."""
again = Shifted(lambda trained: float(trained % 2 == 0))
"""Right in every second training of a process alone, from the first on."""
