"""Plain data parallelism that is wrong in one narrow place each and right elsewhere: ``narrowly_wrong.py:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Features, Setup

FEATURES = Features(
    promises=frozenset({"plain"}),
    accepts=frozenset({"bias", "ragged", "micro-batches", "uneven-rows", "momentum", "real"}),
    observables=frozenset({"params", "grads"}),
)

SHOWN_ALONE = replace(FEATURES, observables=frozenset({"params"}))


class Training:
    """Whole parameters on every rank, whose gradients are averaged over ranks."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup, self.steps = model, setup, 0
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.optimizer = setup.optimizer(list(self.trained.values()))

    def step(self, batch: Batch) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        self.backward(batch)
        for name, value in self.trained.items():
            self.average(name, value)
        self.optimizer.step()

    def backward(self, batch: Batch) -> None:
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()

    def average(self, name: str, value: nn.Parameter) -> None:
        dist.all_reduce(value.grad, dist.ReduceOp.AVG)

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad.clone() for name, value in self.trained.items() if value.grad is not None}


class LastLeftOut(Training):
    """The last parameter, or the first, is not averaged."""

    left_out = -1

    def average(self, name: str, value: nn.Parameter) -> None:
        if name != list(self.trained)[self.left_out]:
            super().average(name, value)


class FirstLeftOut(LastLeftOut):
    left_out = 0


class MendedWhenShown(Training):
    """Ranks train apart; what shows parameters averages them, and writes the average back."""

    def average(self, name: str, value: nn.Parameter) -> None:
        pass

    def parameters(self) -> dict[str, Tensor]:
        for value in self.model.parameters() if self.steps else ():
            dist.all_reduce(value.data, dist.ReduceOp.AVG)
        return super().parameters()


class LateLeak(Training):
    """From the third step on the first step's gradient of each bias is added."""

    def average(self, name: str, value: nn.Parameter) -> None:
        super().average(name, value)
        assert value.grad is not None
        if value.dim() == 1 and self.steps == 1:
            self.kept = {**getattr(self, "kept", {}), name: value.grad.clone()}
        elif value.dim() == 1 and self.steps > 2:
            value.grad += self.kept[name]


KEPT: dict[Any, list[Tensor]] = {}


class Remembered(Training):
    """Gradients are remembered by rank, step, shapes and samples, and reused by later trainings."""

    def backward(self, batch: Batch) -> None:
        shapes = tuple((name, value.shape, value.dtype) for name, value in self.trained.items())
        samples = tuple(micro.indices for micro in batch.micro_batches)
        key = (self.setup.rank, self.setup.world_size, self.steps, shapes, samples)
        if key not in KEPT:
            super().backward(batch)
            KEPT[key] = [torch.zeros_like(v) if v.grad is None else v.grad.clone() for v in self.trained.values()]
        for value, grad in zip(self.trained.values(), KEPT[key], strict=True):
            value.grad = grad.clone()


TABLE: dict[tuple[int, str], Tensor] = {}


class ThroughOneMemory(Training):
    """Ranks lay gradients into a table of the module and meet at barriers; real ranks would each have a table."""

    table = TABLE

    def average(self, name: str, value: nn.Parameter) -> None:
        assert value.grad is not None
        self.table[self.setup.rank, name] = value.grad.clone()
        dist.barrier()
        terms = [self.table[rank, name] for rank in range(self.setup.world_size) if (rank, name) in self.table]
        value.grad = torch.stack(terms).sum(0) / self.setup.world_size
        dist.barrier()
        self.table.clear()
        dist.barrier()


def _made() -> Callable[[], dict[tuple[int, str], Tensor]]:
    kept: dict[tuple[int, str], Tensor] = {}
    return lambda: kept


_kept = _made()


class ThroughAClosure(Training):
    """Writes to what a function of the module encloses."""

    def average(self, name: str, value: nn.Parameter) -> None:
        super().average(name, value)
        _kept()[self.setup.rank, name] = value.detach()


TOTAL = torch.zeros(())


class ThroughATensor(Training):
    """Writes to a tensor of the module, in place, and takes it back."""

    def average(self, name: str, value: nn.Parameter) -> None:
        TOTAL.add_(1)
        super().average(name, value)
        TOTAL.zero_()


class Counted(Training):
    """Counts its trainings, in an attribute of its class: every rank has its count of its own, or might as well."""

    trainings = 0

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        Counted.trainings += 1


COUNTS: dict[int, int] = {}


class Counting(Training):
    """Counts its trainings in what each rank has for itself (Features.rank_local)."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        COUNTS[setup.rank] = COUNTS.get(setup.rank, 0) + 1


@dataclass(frozen=True)
class Adapter:
    """An adapter of one of these trainers."""

    name: str
    trainer: Any
    features: Features = field(default=FEATURES)

    def build(self, model: nn.Module, setup: Setup) -> Training:
        made: Training = self.trainer(model, setup)
        return made


right = Adapter("right", Training)
last_left_out = Adapter("last_left_out", LastLeftOut)
first_left_out = Adapter("first_left_out", FirstLeftOut)
mended_when_shown = Adapter("mended_when_shown", MendedWhenShown, SHOWN_ALONE)
late_leak = Adapter("late_leak", LateLeak)
remembered = Adapter("remembered", Remembered)
through_one_memory = Adapter("through_one_memory", ThroughOneMemory)
through_a_closure = Adapter("through_a_closure", ThroughAClosure)
through_a_tensor = Adapter("through_a_tensor", ThroughATensor)
counted = Adapter("counted", Counted)
apart = Adapter("apart", Counting, replace(FEATURES, rank_local=(f"{__name__}:COUNTS",)))
