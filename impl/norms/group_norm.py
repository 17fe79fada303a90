"""GroupNorm: y = xhat * weight + bias by channel. Sample i's gradients are sum_t xhat_t * g_t and sum_t g_t, [C].

The statistics in xhat are those of one sample and one group of channels, over all of the group's channels and
positions; the gradients' sums over positions keep the channels apart.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from . import _terms

LAYER = nn.GroupNorm


def squared_norm(module: nn.GroupNorm, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over the trainable ones of weight and bias; inputs [B, C, ...]."""
    return _terms.squares(per_sample_gradient(module, activations, backprops), backprops)


def per_sample_gradient(module: nn.GroupNorm, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, C], "bias": [B, C]}, trainable ones only."""
    summands = _summands(module, activations, backprops)
    return {name: _positions_last(x_BC).sum(2) for name, x_BC in summands.items()}


def weighted_gradient(
    module: nn.GroupNorm, activations: Tensor, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{"weight": [C], "bias": [C]}, trainable ones only."""
    summands = _summands(module, activations, _terms.scaled(backprops, weights_B))
    return {name: _positions_last(x_BC).sum((0, 2)) for name, x_BC in summands.items()}


def normalised(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """xhat, of the shape of ``x`` [B, C, ...]."""
    return F.group_norm(x, module.num_groups, eps=module.eps) if len(x) else x


def _summands(module: nn.GroupNorm, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """What a gradient is the sum of over positions, [B, C, ...]; trainable ones only."""
    found = {}
    if module.weight is not None and module.weight.requires_grad:
        found["weight"] = normalised(module, activations) * backprops
    if module.bias is not None and module.bias.requires_grad:
        found["bias"] = backprops
    return found


def _positions_last(x: Tensor) -> Tensor:
    """[B, C, T] from [B, C, ...]; T = 1 where there are no positions."""
    return x.reshape(x.shape[0], x.shape[1], x.shape[2:].numel())
