"""Clip factors of samples, and clipping of the one global gradient norm.

Both norms are the square root of *one* sum of squares over all parameters; nothing is a norm of norms. On data whose
squares are exact the norm is then the one root that ``torch.sqrt`` gives, whatever the sharding.

Source: DP-SGD, Abadi et al. 2016, arXiv:1607.00133; ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sharding import collectives
from ..sharding.collectives import Subject
from ..sharding.protocol import Piece, Sharded

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


def clip_global_norm(model: Sharded, max_norm: float) -> Tensor:
    """Scale all reduced gradients by min(1, max_norm / (n + eps)); return n, the norm before, 0-dim."""
    norm = global_squared_norm(model).sqrt()
    coefficient = global_factor(norm, max_norm)
    for shard in model.shards():
        if shard.grad is not None:
            shard.grad.mul_(coefficient)
    return norm


def global_factor(norm: Tensor, max_norm: float) -> Tensor:
    """0-dim: the same expression as ``torch.nn.utils.clip_grads_with_norm_``, eps and division included."""
    return torch.clamp(max_norm / (norm + EPS), max=1.0)


def global_squared_norm(model: Sharded) -> Tensor:
    """0-dim: sum of squares of every reduced gradient element, by one all-reduce. Padding is not read."""
    squares = [
        piece.value.new_zeros(()) if piece.copied else own_gradient(piece).square().sum() for piece in model.pieces()
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    return collectives.all_reduce_sum(GLOBAL_NORM, total, model.axis)


def own_gradient(piece: Piece) -> Tensor:
    """The real elements of this rank's piece of a gradient; none when it owns none."""
    return torch.zeros_like(piece.value) if piece.gradient is None else piece.gradient


def _like(value: float, tensor: Tensor) -> Tensor:
    return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
