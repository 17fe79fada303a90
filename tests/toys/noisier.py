"""Opacus with noise of another scale than it was asked for. Needs the extra ``fsdpcheck[opacus]``."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdpcheck.adapters.builtin.opacus import GhostFsdp, sound
from fsdpcheck.adapters.contract import Setup


class Noisier(GhostFsdp):
    """``opacus:sound`` whose noise is ``factor`` times what it should be."""

    def __init__(self, factor: float) -> None:
        super().__init__(f"opacus, noise times {factor}", sound.features.accepts, noise=True)
        self._factor = factor

    def build(self, model: nn.Module, setup: Setup) -> Any:
        trainer = super().build(model, setup)
        trainer.optimizer.noise_multiplier *= self._factor
        return trainer


a_little_less = Noisier(0.98)
a_little_more = Noisier(1.02)
twice = Noisier(2.0)
as_asked = Noisier(1.0)
