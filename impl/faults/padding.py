"""Planted bugs of padding: not zero after init, reduction or update, or read."""

from __future__ import annotations

from typing import Any

import torch

from ._fault import Function, Hit, fault


@fault(
    "sharding.flat_buffer:FlatBuffer.__init__",
    "padding value 42, https://github.com/pytorch/pytorch/pull/113106",
    "padding.zero",
    cause="when the parameters are sharded",
)
def padding_garbage_after_init(original: Function, hit: Hit) -> Function:
    """Padding of freshly sharded parameters is 42."""

    def planted(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if self.real < self.shard_numel:
            hit()
            self.shard.data[self.padding] = 42

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.accumulate",
    "bucket tail not cleared, https://github.com/NVIDIA/Megatron-LM/pull/5077",
    "padding.zero",
    cause="when gradients are reduced",
)
def padding_garbage_after_reduce(original: Function, hit: Hit) -> Function:
    """Padding of reduced gradients is 1, and the optimizer carries it into the parameters' padding."""

    def planted(self: Any, gradient: torch.Tensor) -> None:
        if self.trainable.real < self.trainable.shard_numel:
            hit()
            gradient[self.trainable.padding] = 1
        original(self, gradient)

    return planted


@fault(
    "trainer:Trainer.accumulate",
    "bucket tail cleared too late, https://github.com/NVIDIA/Megatron-LM/pull/5077",
    "padding.zero",
    cause="when gradients are reduced",
)
def padding_cleared_before_the_update(original: Function, hit: Hit) -> Function:
    """Padding of reduced gradients is 1 until the last micro-batch is done: no parameter, norm or update shows it."""

    def planted(self: Any, micro_batches: Any) -> None:
        reduce = self.model.reduce_gradients

        def fill(value: int) -> None:
            for unit in self.model.units:
                if unit.trainable is not None and unit.trainable.real < unit.trainable.shard_numel:
                    hit()
                    unit.trainable.shard.grad[unit.trainable.padding] = value

        def dirty() -> None:
            reduce()
            fill(1)

        self.model.reduce_gradients = dirty
        try:
            original(self, micro_batches)
        finally:
            del self.model.reduce_gradients
        fill(0)

    return planted


@fault("trainer:Trainer.update", "an update that does not map zero to zero", "padding.zero", cause="optimizer's update")
def padding_grows_at_update(original: Function, hit: Hit) -> Function:
    """The optimizer's step adds 1 to the padding of every trainable shard."""

    def planted(self: Any) -> None:
        original(self)
        for unit in self.model.units:
            if unit.trainable is not None and unit.trainable.real < unit.trainable.shard_numel:
                hit()
                unit.trainable.shard.data[unit.trainable.padding] += 1

    return planted


@fault(
    "sharding.flat_buffer:FlatBuffer.attach",
    "padded offsets used on real data, https://github.com/NVIDIA/Megatron-LM/pull/5077",
    "padding.unread",
    cause="padding is read",
)
def padding_read_by_unshard(original: Function, hit: Hit) -> Function:
    """The sum of the padding is added to the last parameter; harmless only while padding is zero."""

    def planted(self: Any) -> None:
        padding = self.full[self.numel :]
        if len(padding):
            hit()
            self.full[self.numel - 1] += padding.sum()
        original(self)

    return planted
