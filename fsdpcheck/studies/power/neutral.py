"""Errors that can be planted under any adapter: they sit in what the harness itself hands to the implementation.

Each is an install (see engines/_common/patches.py): calling it gives a context manager whose value counts its ``hits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.adapters.contract import Batch, MicroBatch
from fsdpcheck.compat import torch_private
from fsdpcheck.program import optimizers
from fsdpcheck.workload import batches
from fsdpcheck.workload.optimizer import make_optimizer

Install = Callable[[], AbstractContextManager["Planted"]]


@dataclass
class Planted:
    """``hits``: how often the error was made."""

    hits: int = 0


def gradient_off_by_1e_3() -> AbstractContextManager[Planted]:
    """Each rank's largest gradient element is off by a part in 10**3 when the optimizer gets it."""
    return _gradient_off(1e-3)


def gradient_off_by_1e_6() -> AbstractContextManager[Planted]:
    """The same, by a part in 10**6."""
    return _gradient_off(1e-6)


def gradient_off_by_1e_9() -> AbstractContextManager[Planted]:
    """The same, by a part in 10**9."""
    return _gradient_off(1e-9)


def gradient_off_by_1e_12() -> AbstractContextManager[Planted]:
    """The same, by a part in 10**12."""
    return _gradient_off(1e-12)


def sample_dropped() -> AbstractContextManager[Planted]:
    """Each rank loses the first sample of its first micro-batch that has one."""
    return _other_batch(lambda micro: _rows(micro, range(1, len(micro.indices))))


def sample_duplicated() -> AbstractContextManager[Planted]:
    """Each rank has the first sample of its first non-empty micro-batch twice."""
    return _other_batch(lambda micro: _rows(micro, [0, *range(len(micro.indices))]))


def targets_swapped() -> AbstractContextManager[Planted]:
    """The first two samples of each rank's first non-empty micro-batch have each other's targets."""
    return _other_batch(_swapped)


@contextmanager
def _gradient_off(relative: float) -> Iterator[Planted]:
    planted = Planted()

    def make(spec: Any, parameters: Iterable[torch.nn.Parameter], *apart: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(spec, parameters, *apart)
        optimizer.register_step_pre_hook(lambda *_: _disturb(optimizer, relative, planted))
        return optimizer

    with torch_private.replaced(optimizers, make_optimizer=make):
        yield planted


@torch.no_grad()
def _disturb(optimizer: torch.optim.Optimizer, relative: float, planted: Planted) -> None:
    """Multiply the local gradients' largest element by 1 + ``relative``."""
    locals_ = [
        _local(p.grad).view(-1) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    largest = max((own for own in locals_ if own.numel()), key=lambda own: float(own.abs().max()), default=None)
    if largest is None:
        return
    place = int(largest.abs().argmax())
    planted.hits += bool(largest[place])
    largest[place] *= 1 + relative


def _local(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


@contextmanager
def _other_batch(change: Callable[[MicroBatch], MicroBatch]) -> Iterator[Planted]:
    planted, original = Planted(), batches.batch

    def batch(*arguments: Any, **named: Any) -> Batch:
        right = original(*arguments, **named)
        micro_batches = list(right.micro_batches)
        for place, micro in enumerate(micro_batches):
            if micro.indices:
                micro_batches[place] = change(micro)
                planted.hits += micro_batches[place] is not micro
                break
        return replace(right, micro_batches=tuple(micro_batches))

    batches.batch = batch
    try:
        yield planted
    finally:
        batches.batch = original


def _rows(micro: MicroBatch, rows: Iterable[int]) -> MicroBatch:
    kept = list(rows)
    return MicroBatch(micro.inputs[kept], micro.targets[kept], tuple(micro.indices[row] for row in kept))


def _swapped(micro: MicroBatch) -> MicroBatch:
    if len(micro.indices) < 2:
        return micro
    order = [1, 0, *range(2, len(micro.indices))]
    return MicroBatch(micro.inputs, micro.targets[order], micro.indices)
