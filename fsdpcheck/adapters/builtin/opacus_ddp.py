"""Opacus over its own data parallelism, ``DifferentiallyPrivateDistributedDataParallel``: parameters stay whole.

Needs the extra ``fsdpcheck[opacus]``. Gradients of samples are made by hooks, or by ``ghost`` are clipped without being
made. Rank 0 alone adds noise; then gradients are summed. Tried with opacus 1.6.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from opacus.distributed import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    DifferentiallyPrivateDistributedDataParallel as DataParallel,
)
from torch import nn

from fsdpcheck.adapters.builtin import opacus
from fsdpcheck.adapters.contract import Setup, Trait


class _Loop(opacus.Loop):
    def note(self) -> None:
        """Nothing: where gradients of samples are made, norms and factors are local to the optimizer."""


class Ghost(opacus.GhostFsdp):
    mode = "ghost"

    def __init__(self, name: str, accepts: frozenset[Trait], loss_reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__(name, accepts, loss_reduction, noise=True)
        shown = self.features.observables - {"accounted"}
        promises = self.features.promises - {"sharded", "accounted"}
        reasons = {
            **self.features.reasons,
            "features.broadcast": "sends parameters from rank 0, and leaves buffers as each rank has built them",
            "sharded": "keeps every parameter whole on every rank",
            "accounted": "asked of Opacus over FSDP2",
        }
        self.features = replace(self.features, promises=promises, reasons=reasons, observables=shown)

    def parallel(self, model: nn.Module, setup: Setup) -> nn.Module:
        made: nn.Module = DataParallel(model)
        return made


class PerSample(Ghost):
    """Losses are summed: Opacus multiplies what comes of a mean by the samples of its rank again, which rounds."""

    mode = "hooks"
    loop = _Loop

    def __init__(self, name: str, accepts: frozenset[Trait]) -> None:
        super().__init__(name, accepts, "sum")
        self.features = replace(self.features, observables=frozenset({"params", "grads"}))

    def normalise(self, optimizer: Any, normaliser: float) -> None:
        """Behind the sum over ranks: before it, as in a step hook of Opacus, each rank's division would round."""
        optimizer.original_optimizer.register_step_pre_hook(lambda *_: opacus.divide(normaliser, optimizer))


_SOUND: frozenset[Trait] = opacus.sound.features.accepts | {"rows<ranks", "uneven-rows"}

adapter = PerSample("opacus_ddp", _SOUND | {"empty-rank"})
padding_idx = PerSample("opacus_ddp, padding_idx", adapter.features.accepts | {"padding_idx"})
"""A known finding: gradients of samples have that of the padding row, which ``nn.Embedding`` drops."""
ghost = Ghost("opacus_ddp, ghost clipping", _SOUND)
