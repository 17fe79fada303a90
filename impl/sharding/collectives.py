"""Every message between ranks, by name. Nothing else in this package calls ``torch.distributed`` collectives.

Each function takes ``unit``: the object, with a canonical name ``fqn``, whose data travels. It is not used for the
arithmetic; it is in the frame so that a tracer can tell two equally shaped collectives apart (bug class "same shape,
other order", PyTorch pull request 75902).

Averages are one exact sum followed by one division where the backend does so (gloo). A group of one rank communicates
nothing and divides by nothing; an empty buffer is neither gathered nor scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two flat-buffer collectives and deprecated the old names.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Named(Protocol):
    """Anything with a canonical name."""

    @property
    def fqn(self) -> str: ...


@dataclass(frozen=True)
class Subject:
    """The name of data that belongs to no unit, such as a vector of norms."""

    fqn: str


WHOLE = Subject("(whole tensors, to show)")


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it: its process group, the rank inside it and the number W of its ranks."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


ALONE = Axis(None, 0, 1)
"""An axis of one rank: nothing is communicated over it."""


def axis(group: dist.ProcessGroup | None = None) -> Axis:
    """The axis of ``group`` (None: the default group; without ``init_process_group``, an axis of one rank)."""
    if not dist.is_initialized():
        return ALONE
    group = dist.group.WORLD if group is None else group  # looked up once, not in every call
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def all_gather(unit: Named, full: Tensor, shard: Tensor, axis: Axis) -> None:
    """``full`` [W*s] becomes the shards [s] of all ranks, end to end in rank order."""
    if axis.size == 1 or full.numel() == 0:
        full.copy_(shard)
    else:
        _all_gather(full, shard, group=axis.group)


def reduce_scatter_average(unit: Named, full: Tensor, axis: Axis) -> Tensor:
    """This rank's piece [s] of the mean over ranks of ``full`` [W*s]; with one rank, ``full`` itself."""
    if axis.size == 1 or full.numel() == 0:
        return full
    shard = torch.empty(full.numel() // axis.size, dtype=full.dtype, device=full.device)
    _reduce_scatter(shard, full, op=dist.ReduceOp.AVG, group=axis.group)
    return shard


def all_reduce_average(unit: Named, values: Tensor, axis: Axis) -> Tensor:
    """``values`` averaged over the ranks, in place; returned for convenience."""
    if axis.size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.AVG, group=axis.group)
    return values


def all_reduce_sum(unit: Named, values: Tensor, axis: Axis) -> Tensor:
    """``values`` summed over the ranks, in place; returned for convenience."""
    if axis.size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=axis.group)
    return values


def all_reduce_max(unit: Named, values: Tensor, axis: Axis) -> Tensor:
    """The largest over the ranks of each of ``values``, in place; returned for convenience."""
    if axis.size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=axis.group)
    return values


def broadcast(unit: Named, values: Tensor, axis: Axis) -> None:
    """``values`` become those of the axis' first rank, in place."""
    if axis.size > 1 and values.numel() > 0:
        dist.broadcast(values, group=axis.group, group_src=0)


def gather(unit: Named, shard: Tensor, axis: Axis) -> Tensor | None:
    """On rank 0 the shards [s] of all ranks, end to end in rank order, as a new [W*s]; None on the others."""
    if axis.size == 1:
        return shard.clone()
    full = shard.new_empty(axis.size * shard.numel()) if axis.rank == 0 else None
    pieces = None if full is None else list(full.chunk(axis.size))
    if shard.numel() > 0:
        dist.gather(shard, pieces, group=axis.group, group_dst=0)
    return full
