"""softmax, log_softmax and scaled dot-product attention on the grid.

softmax needs no backward of its own: torch's (g - sum(g p)) p is exact when p is dyadic. That of log_softmax would take
exp of rounded logarithms; here it multiplies by them rounded to the grid of softmax.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsdpcheck.errors import NotExact
from fsdpcheck.exact.surrogates import grids


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """aten::_softmax"""
    return grids.now().softmax.round(_true(x, dim)).to(x.dtype)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """aten::_log_softmax"""
    return grids.now().log.round(_true(x, dim).log()).to(x.dtype)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """aten::_log_softmax_backward_data"""
    share = grids.now().loss.round(output.double().exp()).to(grad.dtype)
    return grad - share * grad.sum(dim, keepdim=True)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """aten::_safe_softmax: rows that are masked altogether give zeros."""
    masked = (x == -math.inf).all(dim, keepdim=True)
    return torch.where(masked, 0.0, torch.softmax(x.masked_fill(masked, 0.0), dim, dtype=dtype))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """aten::scaled_dot_product_attention, from exact products and the softmax of the grid.

    [..., L, E], [..., S, E], [..., S, V] -> [..., L, V]. The scale is the power of two at or below the true one (torch
    itself multiplies query and key by its square root, which is on no grid). With ``enable_gqa`` each head of keys and
    values serves a group of queries. Raises NotExact for dropout.
    """
    if dropout_p > 0:
        raise NotExact("attention with dropout has no surrogate; next: the tier of real numbers")
    if enable_gqa:
        key, value = (_for_groups(part, query.shape[-3] // part.shape[-3]) for part in (key, value))
    true_scale = query.size(-1) ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1)
    if grids.now().scales:
        scores = scores * 2.0 ** math.floor(math.log2(true_scale))
    if is_causal:
        size = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(size, dtype=torch.bool, device=scores.device).triu(1), -math.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
    if attn_mask is None:
        return torch.softmax(scores, -1) @ value
    return safe_softmax(scores, -1) @ value


def _for_groups(heads: Tensor, size: int) -> Tensor:
    """[..., H, S, E] -> [..., H * size, S, E]: each head ``size`` times in a row."""
    return heads.unsqueeze(-3).expand(*heads.shape[:-2], size, *heads.shape[-2:]).flatten(-4, -3)


def _true(x: Tensor, dim: int) -> Tensor:
    """softmax in float64, by exp alone."""
    real = x.double()
    if not real.numel():
        return real
    powers = torch.exp(real - real.amax(dim, keepdim=True))
    return powers / powers.sum(dim, keepdim=True)
