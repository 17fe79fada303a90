"""What a user's model spells out of operators: roots of norms, cosines and sines of rotary embeddings, top-k, shares.

Kernels of these are used by implementations too (noise is made of cosines, optimizers take roots), so none is replaced
in torch's dispatcher. They are operators of their own, which stand for torch's within the forward of the user's modules
alone (workload/user_model/spelled_out.py). No gradient goes back through a root: a norm's statistics are constants
there, as they are in the coarse normalisations. What is multiplied by an inverse root, or divided by a root, is rounded
as a normalisation's output is, and its gradient is handed on as it is, so that a deep model stays exact. Shares of a
total, such as a router's weights of experts over their sum, are rounded as a softmax's are; both get a gradient.
Complex numbers are multiplied as pairs of real ones, and tables of cosines in buffers are rounded as cosines are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch import library as dispatcher

from fsdpcheck.exact.surrogates import grids
from fsdpcheck.exact.surrogates.grid_rounding import power_of_two

OPERATORS: Final = ("inverse_root", "root", "over_root", "share", "inverse", "cosine", "sine")
"""Of the namespace fsdpcheck."""
ROOTS: Final = (-8, 8)
"""Least and greatest exponent of a root and of its inverse."""
INVERSES: Final = (-1, 1)
"""Least and greatest exponent of what gradients of shares are multiplied by."""

SQUARES: Final = "_fsdpcheck_squares"
"""Attribute of a root: (what it is the root of, whether it is the inverse)."""
TOTAL: Final = "_fsdpcheck_total"
"""Attribute of a sum that keeps its dims: what may be divided by it are shares."""


def is_marked(tensor: Tensor) -> bool:
    """Whether a product or a quotient with it is a surrogate; with a copy of it, that a cast makes, it is not."""
    return hasattr(tensor, SQUARES) or hasattr(tensor, TOTAL)


def _operator(name: str) -> Callable[[Callable[..., Tensor]], Any]:
    return dispatcher.custom_op(f"fsdpcheck::{name}", mutates_args=())


@_operator("inverse_root")
def inverse_root(x: Tensor) -> Tensor:
    """[...]: a power of two within a factor 1.6 of 1 / sqrt(x), without a gradient."""
    return power_of_two(1 / x.double().sqrt(), *ROOTS).to(x.dtype)


@_operator("root")
def root(x: Tensor) -> Tensor:
    """[...]: one over ``inverse_root``."""
    return (1 / power_of_two(1 / x.double().sqrt(), *ROOTS)).to(x.dtype)


@_operator("over_root")
def over_root(x: Tensor, squares: Tensor) -> Tensor:
    """[...]: x / sqrt(squares), rounded as a normalised input is; ``squares`` as long, or 1, along each dim."""
    real = x.double() / squares.double().sqrt()
    return grids.now().normal.round(real).to(x.dtype)


@_operator("cosine")
def cosine(x: Tensor) -> Tensor:
    """[...]: cos(x), in radians, rounded."""
    return grids.now().turn.round(x.double().cos()).to(x.dtype)


@_operator("sine")
def sine(x: Tensor) -> Tensor:
    """[...]: sin(x), in radians, rounded."""
    return grids.now().turn.round(x.double().sin()).to(x.dtype)


@_operator("share")
def share(x: Tensor, total: Tensor) -> Tensor:
    """[...]: x / total, rounded; 0 where ``total`` is 0, which on a grid it may be."""
    real = torch.where(total == 0, 0.0, x.double() / total.double())
    return grids.now().share.round(real).to(x.dtype)


@_operator("inverse")
def inverse(total: Tensor) -> Tensor:
    """[...]: a power of two near 1 / |total| with its sign, without a gradient; 0 where ``total`` is 0."""
    size = power_of_two(1 / torch.where(total == 0, 1.0, total.double().abs()), *INVERSES)
    return (size * total.sign()).to(total.dtype)


def product_of_complex(x: Tensor, y: Tensor) -> Tensor:
    """[...]: x * y, of which one is complex, or both, by products and sums of real numbers."""
    if not (x.is_complex() and y.is_complex()):
        pairs, factor = (x, y) if x.is_complex() else (y, x)
        return torch.view_as_complex(torch.view_as_real(pairs.resolve_conj()) * factor.unsqueeze(-1))
    (a, b), (c, d) = (torch.view_as_real(one.resolve_conj()).unbind(-1) for one in (x, y))
    return torch.view_as_complex(torch.stack([a * c - b * d, a * d + b * c], -1))


def polar(size: Tensor, angle: Tensor) -> Tensor:
    """[...]: complex numbers of this size and angle, the latter in radians, by ``cosine`` and ``sine``."""
    return torch.view_as_complex(torch.stack([size * cosine(angle), size * sine(angle)], -1))


def is_table(buffer: Tensor) -> bool:
    """Whether a buffer looks like cosines and sines, or turns: complex, or of several dims and within [-1, 1]; and is
    on no grid yet."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    if not real.is_floating_point() or (buffer.dim() < 2 and not buffer.is_complex()) or not real.numel():
        return False
    steps = real.double() * 2**grids.FINE.turn.bits
    return bool((real.abs() <= 1).all() and (steps != steps.round()).any())


def rounded_table(buffer: Tensor, turn: grids.Grid = grids.FINE.turn) -> Tensor:
    """``buffer`` with each real number rounded as a cosine is, to the grid ``turn``."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    found = turn.round_constants(real.double()).to(real.dtype)
    return torch.view_as_complex(found) if buffer.is_complex() else found


def top_k(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """(values, indices) of torch.topk; of equal values, which are many on a grid, the first is chosen.

    torch says nothing of ties, and its kernels choose by the size of the batch.
    """
    order = torch.sort(x.detach(), dim=dim, descending=largest, stable=True)[1].narrow(dim, 0, k)
    return x.gather(dim, order), order


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_share(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], output)


def _share_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The true formula, (g / total, -sum(g share) / total), with a power of two for 1 / total."""
    total, given = ctx.saved_tensors
    scaled = grad * inverse(total)
    return scaled, -(scaled * given).sum_to_size(total.shape)


cosine.register_autograd(lambda ctx, grad: -grad * sine(ctx.saved_tensors[0]), setup_context=_keep)
sine.register_autograd(lambda ctx, grad: grad * cosine(ctx.saved_tensors[0]), setup_context=_keep)
share.register_autograd(_share_backward, setup_context=_keep_share)
for _one in (inverse_root, root, inverse):
    _one.register_autograd(lambda ctx, grad: None, setup_context=lambda ctx, inputs, output: None)
over_root.register_autograd(lambda ctx, grad: (grad.clone(), None), setup_context=lambda ctx, inputs, output: None)
for _one in (inverse_root, root, inverse, cosine, sine):
    _one.register_fake(torch.empty_like)
for _one in (over_root, share):
    _one.register_fake(lambda x, whole: torch.empty_like(x))


def _mapped(operator: Any, info: Any, dims: tuple[int | None, ...], *operands: Tensor) -> tuple[Tensor, int]:
    """Under vmap all operands have the mapped dim in front, with 1 where they are not mapped, and dims as many."""
    rank = max(one.dim() - (dim is not None) for one, dim in zip(operands, dims, strict=True))
    fronts = [one.unsqueeze(0) if dim is None else one.movedim(dim, 0) for one, dim in zip(operands, dims, strict=True)]
    fronts = [one.reshape(one.shape[0], *[1] * (rank + 1 - one.dim()), *one.shape[1:]) for one in fronts]
    longest = max(one.shape[0] for one in fronts)
    first = fronts[0].expand(longest, *fronts[0].shape[1:])
    return operator(first, *fronts[1:]), 0


for _one in (inverse_root, root, inverse, cosine, sine, over_root, share):
    _one.register_vmap(functools.partial(_mapped, _one))


@functools.cache
def shard() -> None:
    """Say where DTensor may shard what they give: wherever it is sharded already."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def placements(x: Any, *squares: Any) -> Any:
        long = [dim for dim in range(x.ndim) if all(one.shape[dim] == x.shape[dim] for one in squares)]
        return [([one], [one] * (1 + len(squares))) for one in [Replicate(), *map(Shard, long)]]

    ops: Any = torch.ops.fsdpcheck
    register_sharding([getattr(ops, name).default for name in OPERATORS])(placements)
