"""Planted bugs of memory that is read before it is written."""

from __future__ import annotations

from typing import Any

import torch

from ..clipping import clip_factors
from ..sharding import collectives
from ._fault import Function, Hit, fault

_ALIGNMENT = 8
"""Elements to a multiple of which a bucket is rounded up."""


@fault(
    "clipping.clip_factors:global_squared_norm",
    "alignment padding of a bucket counted in the norm, https://github.com/NVIDIA/Megatron-LM/pull/5077",
    "global-norm.returned",
    cause=r"uninitialised memory: .*uninitialised_memory\.py:\d+ got from",
)
def norm_over_an_unwritten_tail(original: Function, hit: Hit) -> Function:
    """The global norm is taken over a bucket rounded up to eight elements, whose tail nobody has written."""

    def planted(model: Any) -> torch.Tensor:
        own = torch.cat([clip_factors.own_gradient(piece).flatten() for piece in model.pieces() if not piece.copied])
        bucket = torch.empty(-(-len(own) // _ALIGNMENT) * _ALIGNMENT, dtype=own.dtype)
        bucket[: len(own)] = own
        if len(bucket) > len(own):
            hit()
        return collectives.all_reduce_sum(clip_factors.GLOBAL_NORM, bucket.square().sum(), model.axis)

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.accumulate",
    "an accumulator made by torch.empty where zeros were meant",
    "training.*",
    cause=r"uninitialised memory: .*uninitialised_memory\.py:\d+ got from",
)
def gradients_added_to_unwritten_memory(original: Function, hit: Hit) -> Function:
    """The first gradient of a step is added to a buffer that nobody has zeroed."""

    def planted(self: Any, gradient: torch.Tensor) -> None:
        if self.trainable.shard.grad is None:
            hit()
            gradient = torch.empty_like(gradient) + gradient
        original(self, gradient)

    return planted
