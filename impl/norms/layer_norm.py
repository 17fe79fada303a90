"""LayerNorm: y = xhat * weight + bias. Sample i's gradients are sum_t xhat_t * g_t and sum_t g_t.

Sums run over all positions between the sample axis and the normalized axes, and are complete before squaring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYER = nn.LayerNorm


def squared_norm(module: nn.LayerNorm, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over the trainable ones of weight and bias."""
    squared_B = torch.zeros(len(backprops), dtype=backprops.dtype, device=backprops.device)
    for gradient in per_sample_gradient(module, activations, backprops).values():
        squared_B = squared_B + gradient.flatten(1).square().sum(1)
    return squared_B


def per_sample_gradient(module: nn.LayerNorm, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, *normalized_shape], "bias": the same}, trainable ones only."""
    gradients = {}
    if module.weight is not None and module.weight.requires_grad:
        normalized = F.layer_norm(activations, module.normalized_shape, eps=module.eps)
        gradients["weight"] = _sum_over_positions(module, normalized * backprops)
    if module.bias is not None and module.bias.requires_grad:
        gradients["bias"] = _sum_over_positions(module, backprops)
    return gradients


def _sum_over_positions(module: nn.LayerNorm, x: Tensor) -> Tensor:
    shape = module.normalized_shape
    positions = x.shape[1 : x.dim() - len(shape)].numel()
    return x.reshape(x.shape[0], positions, *shape).sum(1)
