"""Collectives of a forward with what their backward has to do, along the ranks of one group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor


def summed(value: Tensor, group: Any = None) -> Tensor:
    value = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value


def joined(value: Tensor, dim: int, group: Any = None) -> Tensor:
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def part(value: Tensor, dim: int, group: Any = None) -> Tensor:
    return value.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.group), None


class _Reduced(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, partial: bool, group: Any) -> Tensor:
        ctx.dim, ctx.partial, ctx.group = dim, partial, group
        return joined(value, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        whole = summed(gradient, ctx.group) if ctx.partial else gradient
        return part(whole, ctx.dim, ctx.group), None, None, None


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, partial: bool, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return part(summed(value, group) if partial else value, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return joined(gradient, ctx.dim, ctx.group), None, None, None


def copied(value: Tensor, group: Any = None) -> Tensor:
    """A replicated value, of which each rank then uses what concerns its shard: the backward adds up the ranks."""
    return _Copied.apply(value, group)


def reduced(value: Tensor, group: Any = None) -> Tensor:
    """The sum over ranks, which every rank then uses alike: the backward passes the gradient on."""
    return _Reduced.apply(value, group)


def gathered(value: Tensor, dim: int, partial: bool, group: Any = None) -> Tensor:
    """The ranks' parts as a whole. partial: ranks use it for different things, so the backward adds up first."""
    return _Gathered.apply(value, dim, partial, group)


def scattered(value: Tensor, dim: int, partial: bool, group: Any = None) -> Tensor:
    """This rank's part of a whole value. partial: the value is a rank's summand, and the ranks are added up first."""
    return _Scattered.apply(value, dim, partial, group)


def add_up(parameters: Iterable[nn.Parameter], group: Any = None) -> None:
    """Each gradient becomes its sum over ranks; of a sharded parameter, what this rank holds of it."""
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)
