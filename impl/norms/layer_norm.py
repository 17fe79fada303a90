"""LayerNorm: y = xhat * weight + bias. Sample i's gradients are sum_t xhat_t * g_t and sum_t g_t.

Sums run over all positions between the sample axis and the normalized axes, and are complete before squaring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from . import _terms

LAYER = nn.LayerNorm


def squared_norm(module: nn.LayerNorm, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over the trainable ones of weight and bias."""
    return _terms.squares(per_sample_gradient(module, activations, backprops), backprops)


def per_sample_gradient(module: nn.LayerNorm, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, *normalized_shape], "bias": the same}, trainable ones only."""
    summands = _summands(module, activations, backprops)
    return {name: sum_over_positions(x, module.normalized_shape) for name, x in summands.items()}


def weighted_gradient(
    module: nn.LayerNorm, activations: Tensor, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{"weight": [*normalized_shape], "bias": the same}, trainable ones only."""
    summands = _summands(module, activations, _terms.scaled(backprops, weights_B))
    return {name: sum_over_everything(x, module.normalized_shape) for name, x in summands.items()}


def sum_over_positions(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[B, *shape] from [B, ..., *shape]."""
    positions = x.shape[1 : x.dim() - len(shape)].numel()
    return x.reshape(x.shape[0], positions, *shape).sum(1)


def sum_over_everything(x: Tensor, shape: Sequence[int]) -> Tensor:
    """[*shape] from [..., *shape]: over samples and positions at once."""
    return x.reshape(x.shape[: x.dim() - len(shape)].numel(), *shape).sum(0)


def _summands(module: nn.LayerNorm, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """What a gradient is the sum of over positions, [B, ..., *normalized_shape]; trainable ones only."""
    found = {}
    if module.weight is not None and module.weight.requires_grad:
        found["weight"] = F.layer_norm(activations, module.normalized_shape, eps=module.eps) * backprops
    if module.bias is not None and module.bias.requires_grad:
        found["bias"] = backprops
    return found
