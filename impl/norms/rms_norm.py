"""RMSNorm: y = xhat * weight with xhat = x / rms(x). Sample i's gradient is sum_t xhat_t * g_t."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from . import _terms, layer_norm

LAYER = nn.RMSNorm


def squared_norm(module: nn.RMSNorm, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms of the weight, if it is trainable."""
    return _terms.squares(per_sample_gradient(module, activations, backprops), backprops)


def per_sample_gradient(module: nn.RMSNorm, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, *normalized_shape]} if it is trainable."""
    if not _trainable(module):
        return {}
    products = normalised(module, activations) * backprops
    return {"weight": layer_norm.sum_over_positions(products, module.normalized_shape)}


def weighted_gradient(
    module: nn.RMSNorm, activations: Tensor, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{"weight": [*normalized_shape]} if it is trainable."""
    if not _trainable(module):
        return {}
    products = normalised(module, activations) * _terms.scaled(backprops, weights_B)
    return {"weight": layer_norm.sum_over_everything(products, module.normalized_shape)}


def normalised(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """xhat, of the shape of ``x``."""
    return F.rms_norm(x, module.normalized_shape, None, module.eps)


def _trainable(module: nn.RMSNorm) -> bool:
    return module.weight is not None and module.weight.requires_grad
