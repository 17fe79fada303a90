"""Trainers on DistributedDataParallel, each with a mistake of somebody who writes a training loop, and a right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.adapters.builtin import ddp
from fsdpcheck.adapters.contract import Batch, MicroBatch, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop


class Wrong:
    """An adapter whose trainer is a loop of this class."""

    features = replace(ddp.adapter.features, promises=frozenset({"plain", "global-norm"}))

    def __init__(self, loop: type[TrainingLoop]) -> None:
        self.name, self._loop = loop.__name__, loop

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        return self._loop(DistributedDataParallel(model), setup, named=model)


class ScaleForgotten(TrainingLoop):
    def loss(self, micro: MicroBatch, batch: Batch) -> Tensor:
        losses: Tensor = self.setup.loss(self.model(micro.inputs), micro.targets)
        return losses.sum()


class GradientsKept(TrainingLoop):
    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        super().step(batch)


class FirstSampleDropped(TrainingLoop):
    def loss(self, micro: MicroBatch, batch: Batch) -> Tensor:
        return super().loss(replace(micro, inputs=micro.inputs[1:], targets=micro.targets[1:]), batch)


class OtherSamples(TrainingLoop):
    """Targets that are nobody's."""

    def loss(self, micro: MicroBatch, batch: Batch) -> Tensor:
        return super().loss(replace(micro, targets=micro.targets + 64), batch)


class GradientDoubled(TrainingLoop):
    def accumulate(self, batch: Batch) -> None:
        super().accumulate(batch)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)


class SummedAgain(TrainingLoop):
    def accumulate(self, batch: Batch) -> None:
        super().accumulate(batch)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class RateHalved(TrainingLoop):
    def accumulate(self, batch: Batch) -> None:
        super().accumulate(batch)
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class NeverSteps(TrainingLoop):
    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.accumulate(batch)


class ReadBeforeUpdate(TrainingLoop):
    """Each step begins with the parameters that the training began with."""

    def step(self, batch: Batch) -> None:
        if not hasattr(self, "begun"):
            self.begun = [parameter.detach().clone() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.begun, strict=True):
                parameter.copy_(value)
        super().step(batch)


class ShownOtherwise(TrainingLoop):
    def parameters(self) -> dict[str, Tensor]:
        return {name: value + 1 for name, value in super().parameters().items()}


class MastersUpdated(TrainingLoop):
    """A right one: the optimizer is given copies to update, and the parameters are taken from them behind it."""

    def __init__(self, model: nn.Module, setup: Setup, named: nn.Module) -> None:
        super().__init__(model, setup, named)
        copies = {value: value.detach().clone().requires_grad_(value.requires_grad) for value in model.parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [copies[value] for value in group["params"]]
        self._masters = [*copies.values()]

    def step(self, batch: Batch) -> None:
        self.model.zero_grad()
        self.accumulate(batch)
        self.setup.notify("after_reduce", self)
        self.setup.notify("before_step", self)
        pairs = [*zip(self._masters, self.model.parameters(), strict=True)]
        for master, value in pairs:
            master.data.copy_(value)  # in some cases it was projected
            master.grad = value.grad
        self.optimizer.step()
        for master, value in pairs:
            value.data.copy_(master)


def __getattr__(name: str) -> Any:
    """The adapter of a loop, by the loop's name in small letters."""
    for loop in TrainingLoop.__subclasses__():
        if loop.__module__ == __name__ and loop.__name__.lower() == name.replace("_", ""):
            return Wrong(loop)
    raise AttributeError(name)
