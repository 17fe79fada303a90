"""Clip factors of samples, and clipping of the one global gradient norm.

Both norms are the square root of *one* sum of squares over all parameters; nothing is a norm of norms. On data whose
squares are exact the norm is then the correctly rounded root, whatever the sharding.

Source: DP-SGD, Abadi et al. 2016, arXiv:1607.00133; ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import collectives
from .collectives import Axis, Subject
from .shard import FlatUnit

EPS = 1e-6
GLOBAL_NORM = Subject("(global gradient norm)")


def norms(squared_norms: Tensor) -> Tensor:
    """[b]: the norms."""
    return squared_norms.sqrt()


def factors(squared_norms: Tensor, clip_norm: float) -> Tensor:
    """[b]: min(1, C / (n + eps)) by true division, in the dtype of ``squared_norms``.

    Guarantee: factor * n <= C up to one rounding. (``C / tensor`` would be ``reciprocal() * C``: other bits.)
    """
    return torch.div(_like(clip_norm, squared_norms), norms(squared_norms) + EPS).clamp(max=1.0)


def clip_global_norm(units: Sequence[FlatUnit], max_norm: float, axis: Axis) -> Tensor:
    """Scale all reduced gradients by min(1, max_norm / (n + eps)); return n, the norm before, 0-dim."""
    norm = global_squared_norm(units, axis).sqrt()
    coefficient = global_factor(norm, max_norm)
    for unit in units:
        if unit.trainable is not None and unit.trainable.shard.grad is not None:
            unit.trainable.shard.grad.mul_(coefficient)
    return norm


def global_factor(norm: Tensor, max_norm: float) -> Tensor:
    """0-dim: the same expression as ``torch.nn.utils.clip_grads_with_norm_``, eps and division included."""
    return torch.clamp(max_norm / (norm + EPS), max=1.0)


def global_squared_norm(units: Sequence[FlatUnit], axis: Axis) -> Tensor:
    """0-dim: sum of squares of every reduced gradient element, by one all-reduce. Padding is not read."""
    squares = [own_gradient(unit).square().sum() for unit in units if unit.trainable is not None]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    return collectives.all_reduce_sum(GLOBAL_NORM, total, axis)


def own_gradient(unit: FlatUnit) -> Tensor:
    """The real elements of this rank's gradient shard; none when the shard is all padding."""
    assert unit.trainable is not None
    shard = unit.trainable.shard
    gradient = torch.zeros_like(shard) if shard.grad is None else shard.grad
    return gradient.detach()[: unit.trainable.real]


def _like(value: float, tensor: Tensor) -> Tensor:
    return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
