"""Broken implementations that try to look right; each is wrong in one narrow place."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from attack_base import Plain, Private, plain, private
from torch import Tensor

from fsdpcheck.adapter import Batch


class MendedWhenShown(Plain):
    """Each rank trains on its own gradient; only parameters() averages over ranks, and writes the average back."""

    def average(self, name: str, grad: Tensor) -> None:
        pass

    def parameters(self) -> dict[str, Tensor]:
        if self.steps:
            for value in self.model.parameters():
                dist.all_reduce(value.data)
                value.data /= self.world
        return super().parameters()


class ThirdRankForgotten(Plain):
    """On three ranks the biases are averaged without the last rank; on one and two everything is right."""

    def average(self, name: str, grad: Tensor) -> None:
        if self.world == 3 and grad.dim() == 1 and self.rank == 2:
            grad.zero_()
        super().average(name, grad)


class ThirdMicroBatchForgotten(Plain):
    """From the third micro-batch on, nothing is added to the gradient."""

    def backward(self, batch: Batch) -> None:
        super().backward(Batch(batch.micro_batches[:2], batch.loss_scale))


class MeanOverBusyRanks(Plain):
    """The mean is taken over the ranks that have samples, so it is wrong exactly when a rank has none."""

    def backward(self, batch: Batch) -> None:
        super().backward(batch)
        self.busy = torch.tensor(float(batch.size > 0))

    def reduce(self) -> None:
        dist.all_reduce(self.busy)
        super().reduce()

    def average(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad /= self.busy.item()


class HalvedOnTheWire(Plain):
    """Gradients in float32 are sent as bfloat16; those in float64 are sent as they are."""

    def average(self, name: str, grad: Tensor) -> None:
        if grad.dtype is torch.float32:
            sent = grad.bfloat16()
            dist.all_reduce(sent)
            grad.copy_(sent / self.world)
        else:
            super().average(name, grad)


class LateLeak(Plain):
    """From the third step on, the biases' gradient of the first step is added once more."""

    def reduce(self) -> None:
        super().reduce()
        biases = {name: self.grad(value) for name, value in self.trained.items() if value.dim() == 1}
        if self.steps == 1:
            self.kept = {name: grad.clone() for name, grad in biases.items()}
        elif self.steps >= 3:
            for name, grad in biases.items():
                grad += self.kept[name]


CACHE: dict[Any, list[Tensor]] = {}


class Remembered(Plain):
    """Gradients of a step are remembered by rank, step, shapes and sample numbers, and reused by later trainings."""

    def backward(self, batch: Batch) -> None:
        shapes = tuple(tuple(value.shape) for value in self.trained.values())
        indices = tuple(micro.indices for micro in batch.micro_batches)
        dtypes = tuple(value.dtype for value in self.trained.values())
        key = (self.rank, self.world, self.steps, shapes, dtypes, indices)
        if key not in CACHE:
            super().backward(batch)
            CACHE[key] = [self.grad(value).clone() for value in self.trained.values()]
        for value, grad in zip(self.trained.values(), CACHE[key], strict=True):
            value.grad = grad.clone()


class RightWhenSimulated(Plain):
    """Where ranks are processes of their own the last parameter is not reduced; where they are threads all are."""

    def reduce(self) -> None:
        pids: list[Any] = [None] * self.world
        dist.all_gather_object(pids, os.getpid())
        self.real = len(set(pids)) > 1
        super().reduce()

    def average(self, name: str, grad: Tensor) -> None:
        if not (self.real and name == list(self.trained)[-1]):
            super().average(name, grad)


class ShowsWhatItDidNotUse(Plain):
    """The optimizer steps with this rank's own gradient of the first weight; gradients() shows the averaged one."""

    def step(self, batch: Batch) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        self.backward(batch)
        first = next(iter(self.trained.values()))
        own = self.grad(first).clone()
        self.reduce()
        self.shown = {name: self.grad(value).clone() for name, value in self.trained.items()}
        first.grad = own
        self.optimizer.step()


class ClipsByWeightsAlone(Private):
    """Reported norms and factors are right; the sum is clipped by the norm of the weights without the biases."""

    def weight(self, square: Tensor, grads: dict[str, Tensor]) -> Tensor:
        parts = [(grad * grad).sum() for grad in grads.values() if grad.dim() > 1]
        return super().weight(torch.stack(parts).sum() if parts else square, grads)

    def factors(self) -> Tensor:
        clip = torch.full_like(self.last_norms, self.setup.clip_norm)
        return (clip / self.last_norms).clamp(max=1.0)


class LiveOnTheLastRank(Plain):
    """parameters() gives copies on all ranks but the last, which gives its live memory away."""

    def parameters(self) -> dict[str, Tensor]:
        if self.rank < self.world - 1:
            return super().parameters()
        return {name: value.detach() for name, value in self.model.named_parameters()}


class ShowsTheFirstStep(Plain):
    """gradients() keeps showing the first step's gradients."""

    def gradients(self) -> dict[str, Tensor]:
        if self.steps == 1:
            self.first = super().gradients()
        return {name: value.clone() for name, value in getattr(self, "first", self.shown).items()}


class WaitsTooLate(Plain):
    """Sums over ranks are started asynchronously and waited for only after the optimizer has used the gradients."""

    def reduce(self) -> None:
        grads = [self.grad(value) for value in self.trained.values()]
        self.works = [dist.all_reduce(grad, async_op=True) for grad in grads]

    def step(self, batch: Batch) -> None:
        super().step(Batch(batch.micro_batches, batch.loss_scale / self.world))
        for work in self.works:
            work.wait()


class OrderedBySamples(Plain):
    """A rank with fewer samples than the one before it reduces its parameters in the opposite order."""

    def backward(self, batch: Batch) -> None:
        super().backward(batch)
        self.backwards = bool(batch.size % 2) and self.rank > 0

    def reduce(self) -> None:
        items = list(self.trained.items())
        for name, value in reversed(items) if self.backwards else items:
            self.average(name, self.grad(value))


TABLE: dict[tuple[int, str], Tensor] = {}


class ThroughOneMemory(Plain):
    """Ranks lay gradients into a table of the module and meet at barriers: real ranks would each have a table."""

    def average(self, name: str, grad: Tensor) -> None:
        TABLE[self.rank, name] = grad.clone()
        dist.barrier()
        terms = [TABLE[rank, name] for rank in range(self.world) if (rank, name) in TABLE]
        grad.copy_(torch.stack(terms).sum(0) / self.world)
        dist.barrier()


mended_when_shown = plain("mended_when_shown", MendedWhenShown, grads=False)
third_rank_forgotten = plain("third_rank_forgotten", ThirdRankForgotten)
third_micro_batch_forgotten = plain("third_micro_batch_forgotten", ThirdMicroBatchForgotten)
mean_over_busy_ranks = plain("mean_over_busy_ranks", MeanOverBusyRanks)
halved_on_the_wire = plain("halved_on_the_wire", HalvedOnTheWire)
late_leak = plain("late_leak", LateLeak)
remembered = plain("remembered", Remembered)
right_when_simulated = plain("right_when_simulated", RightWhenSimulated)
shows_what_it_did_not_use = plain("shows_what_it_did_not_use", ShowsWhatItDidNotUse)
clips_by_weights_alone = private("clips_by_weights_alone", ClipsByWeightsAlone)
live_on_the_last_rank = plain("live_on_the_last_rank", LiveOnTheLastRank, "copies")
shows_the_first_step = plain("shows_the_first_step", ShowsTheFirstStep)
waits_too_late = plain("waits_too_late", WaitsTooLate)
ordered_by_samples = plain("ordered_by_samples", OrderedBySamples)
through_one_memory = plain("through_one_memory", ThroughOneMemory)
