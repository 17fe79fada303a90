"""Pipelines with one mistake each, of those that people make: planted in the built-in adapter ``pipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from fsdpcheck.adapters.builtin.pipeline import Loop, Pipeline
from fsdpcheck.adapters.contract import Batch, Part, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop


class Averaging(ScheduleGPipe):
    """Divides gradients by the number of micro-batches, whose losses were summed: ``scale_grads`` left as it is."""

    def __init__(self, stage: Any, count: int, loss_fn: Any, scale_grads: bool) -> None:
        super().__init__(stage, count, loss_fn=loss_fn)


class OfOneStage(Loop):
    """Clips each stage by the norm of its own gradients."""

    def clip(self, limit: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)


class Keeping(Loop):
    """The last stage clears no gradients."""

    def step(self, batch: Batch) -> None:
        if self._stage.is_last:
            self.optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]
        super().step(batch)


class Mistaken(Pipeline):
    def __init__(self, name: str, loop: type[Loop]) -> None:
        super().__init__(name, ScheduleGPipe)
        self._loop = loop

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        made = super().build(model, setup)
        made.__class__ = self._loop
        return made


class Apart(Loop):
    """Shows for its own what another stage has too, and not as it is there: a layer of the first is on all."""

    def parameters(self) -> Mapping[str, Tensor | Part]:
        return {**super().parameters(), "instrument.weight": torch.full((1, 1), float(self._stage.stage_index))}


class Alone(Pipeline):
    """Right, on stages alone."""

    features = replace(Pipeline.features, axes=frozenset({"pp"}))


alone = Alone("stages alone", ScheduleGPipe)
averaging = Pipeline("averages micro-batches", Averaging)
of_one_stage = Mistaken("clips stage by stage", OfOneStage)
keeping = Mistaken("keeps gradients", Keeping)
apart = Mistaken("stages that differ", Apart)
