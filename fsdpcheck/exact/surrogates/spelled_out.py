"""What a model of a user's spells out of operators: roots of norms, cosines and sines of rotary embeddings, top-k.

Kernels of these are used by implementations too (noise is made of cosines, optimizers take roots), so none is replaced
in torch's dispatcher. They are operators of their own, which stand for torch's within the forward of the user's modules
alone (workload/user_model/spelled_out.py). No gradient goes back through a root: a norm's statistics are constants
there, as they are in the coarse normalisations. What is multiplied by an inverse root, or divided by a root, is rounded
as a normalisation's output is, and its gradient is handed on as it is, so that a deep model stays exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch import library as dispatcher

from fsdpcheck.exact.surrogates import normalisation
from fsdpcheck.exact.surrogates.grid_rounding import power_of_two, to_grid

ROOTS: Final = (-8, 8)
"""Least and greatest exponent of a root and of its inverse."""
TURN_BITS: Final = 1
"""Cosines and sines are multiples of 1/2: rotations that keep no lengths, but turn by every quarter."""


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
    """[...]: x / sqrt(squares), rounded to halves within [-2, 2]; ``squares`` as long, or 1, along each dim."""
    real = x.double() / squares.double().sqrt()
    return to_grid(real, normalisation.BITS, -normalisation.LARGEST, normalisation.LARGEST).to(x.dtype)


@_operator("cosine")
def cosine(x: Tensor) -> Tensor:
    """[...]: cos(x), in radians, rounded to halves."""
    return to_grid(x.double().cos(), TURN_BITS, -1.0, 1.0).to(x.dtype)


@_operator("sine")
def sine(x: Tensor) -> Tensor:
    """[...]: sin(x), in radians, rounded to halves."""
    return to_grid(x.double().sin(), TURN_BITS, -1.0, 1.0).to(x.dtype)


def top_k(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """(values, indices) of torch.topk; of equal values, which are many on a grid, the first is chosen.

    torch says nothing of ties, and its kernels choose by the size of the batch.
    """
    order = torch.sort(x.detach(), dim=dim, descending=largest, stable=True)[1].narrow(dim, 0, k)
    return x.gather(dim, order), order


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


cosine.register_autograd(lambda ctx, grad: -grad * sine(ctx.saved_tensors[0]), setup_context=_keep)
sine.register_autograd(lambda ctx, grad: grad * cosine(ctx.saved_tensors[0]), setup_context=_keep)
for _one in (inverse_root, root):
    _one.register_autograd(lambda ctx, grad: None, setup_context=lambda ctx, inputs, output: None)
over_root.register_autograd(lambda ctx, grad: (grad.clone(), None), setup_context=lambda ctx, inputs, output: None)
for _one in (inverse_root, root, cosine, sine):
    _one.register_fake(torch.empty_like)
over_root.register_fake(lambda x, squares: torch.empty_like(x))


@functools.cache
def shard() -> None:
    """Say where DTensor may shard what they give: wherever it is sharded already."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def placements(x: Any, *squares: Any) -> Any:
        long = [dim for dim in range(x.ndim) if all(one.shape[dim] == x.shape[dim] for one in squares)]
        return [([one], [one] * (1 + len(squares))) for one in [Replicate(), *map(Shard, long)]]

    ops: Any = torch.ops.fsdpcheck
    names = ("inverse_root", "root", "over_root", "cosine", "sine")
    register_sharding([getattr(ops, name).default for name in names])(placements)
