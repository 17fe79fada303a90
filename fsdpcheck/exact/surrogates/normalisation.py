"""LayerNorm, GroupNorm and RMSNorm on the grid.

Forward: out = weight * xhat + bias with xhat the true normalised input, rounded (``Grids.normal``). Backward is
linear in the cotangent h = weight * grad: r (h - m(h) - xhat m(h xhat)), the true formula with dyadic stand-ins - r a
power of two near 1/std, m the sum times the power of two at or below 1/count. Statistics come from exact sums,
so they have the same bits for every batch, and so has xhat.
"""

from __future__ import annotations

import math

from torch import Tensor

from fsdpcheck.exact.surrogates import grids
from fsdpcheck.exact.surrogates.grid_rounding import power_of_two

INVERSE_STD = (-1, 0)
"""Least and greatest exponent of r."""
Three = tuple[Tensor, Tensor, Tensor]


def layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Three:
    """aten::native_layer_norm"""
    rows = x.reshape(-1, math.prod(shape))
    xhat, mean, inverse = _normalised(rows, eps)
    out = xhat.to(x.dtype).reshape(x.shape)
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    kept = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return out.clone(), mean.reshape(kept).to(x.dtype), inverse.reshape(kept).to(x.dtype)


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """aten::native_layer_norm_backward"""
    count = math.prod(shape)
    xhat, _, inverse = _normalised(x.reshape(-1, count), None, rstd.reshape(-1, 1).double())
    xhat = xhat.to(grad.dtype)
    rows = grad.reshape(-1, count)
    weighted = rows if weight is None else rows * weight.reshape(-1)
    own = _backward(weighted, xhat, inverse.to(grad.dtype)).reshape(x.shape) if mask[0] else None
    of_weight = (rows * xhat).sum(0).reshape(shape) if mask[1] and weight is not None else None
    of_bias = rows.sum(0).reshape(shape) if mask[2] and bias is not None else None
    return own, of_weight, of_bias


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, area: int, groups: int, eps: float
) -> Three:
    """aten::native_group_norm"""
    xhat, mean, inverse = _normalised(x.reshape(n * groups, channels // groups * area), eps)
    out = xhat.to(x.dtype).reshape(n, channels, area)
    out = out if weight is None else out * weight.reshape(1, channels, 1)
    out = out if bias is None else out + bias.reshape(1, channels, 1)
    statistics = [value.reshape(n, groups).to(x.dtype) for value in (mean, inverse)]
    return out.reshape(x.shape).clone(), statistics[0], statistics[1]


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """aten::native_group_norm_backward"""
    xhat, _, inverse = _normalised(x.reshape(n * groups, channels // groups * area), None, rstd.reshape(-1, 1).double())
    xhat = xhat.to(grad.dtype)
    g_nca = grad.reshape(n, channels, area)
    weighted = g_nca if weight is None else g_nca * weight.reshape(1, channels, 1)
    own = None
    if mask[0]:
        own = _backward(weighted.reshape(xhat.shape), xhat, inverse.to(grad.dtype)).reshape(x.shape)
    of_weight = (g_nca * xhat.reshape(n, channels, area)).sum((0, 2)) if mask[1] else None
    of_bias = g_nca.sum((0, 2)) if mask[2] else None
    return own, of_weight, of_bias


def rms_xhat(x: Tensor, count: int, eps: float) -> Tensor:
    """fsdpcheck::rms_xhat: x / rms over the last ``count`` elements, on the grid."""
    return _rms(x.reshape(-1, count), eps)[0].to(x.dtype).reshape(x.shape).clone()


def rms_xhat_backward(grad: Tensor, x: Tensor, count: int, eps: float) -> Tensor:
    """fsdpcheck::rms_xhat_backward: r (h - xhat m(h xhat))."""
    if grids.now().hands_on:
        return grad.clone()
    xhat, inverse = _rms(x.reshape(-1, count), eps)
    xhat = xhat.to(grad.dtype)
    rows = grad.reshape(-1, count)
    pulled = xhat * _dyadic_mean(rows * xhat)
    return (_dyadic_inverse(inverse).to(grad.dtype) * (rows - pulled)).reshape(x.shape)


def _normalised(rows: Tensor, eps: float | None, inverse: Tensor | None = None) -> Three:
    """(xhat, mean, 1/std) in float64 of rows [r, count]; 1/std from ``eps`` or as it was saved.

    Sums of the inputs and of their squares are exact; all that follows is elementwise.
    """
    real, count = rows.double(), rows.shape[1]
    total = real.sum(1, keepdim=True)
    mean = total / count
    if inverse is None:
        variance = (real.square().sum(1, keepdim=True) * count - total.square()) / count**2
        inverse = 1 / (variance + (eps or 0.0)).sqrt()
    return grids.now().normal.round((real - mean) * inverse), mean, inverse


def _rms(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    real = rows.double()
    inverse = 1 / (real.square().sum(1, keepdim=True) / rows.shape[1] + eps).sqrt()
    return grids.now().normal.round(real * inverse), inverse


def _backward(weighted: Tensor, xhat: Tensor, inverse: Tensor) -> Tensor:
    if grids.now().hands_on:
        return weighted.clone()
    centred = weighted - _dyadic_mean(weighted) - xhat * _dyadic_mean(weighted * xhat)
    return _dyadic_inverse(inverse).to(weighted.dtype) * centred


def _dyadic_mean(rows: Tensor) -> Tensor:
    """Sum over the row times the power of two at or below 1/count, [r, 1]."""
    return rows.sum(1, keepdim=True) * dyadic_share(rows.shape[1])


def dyadic_share(count: int) -> float:
    """The power of two at or below 1/count."""
    return 2.0 ** -(count - 1).bit_length()


def _dyadic_inverse(inverse: Tensor) -> Tensor:
    return power_of_two(inverse, *INVERSE_STD)
