"""GELU, SiLU, tanh and sigmoid on the grid: outputs and slopes are the true ones, rounded.

A backward kernel multiplies the cotangent by a rounded slope, so it is linear in the cotangent, and exact. tanh and
sigmoid need no backward of their own: torch's multiply by 1 - y**2 and y (1 - y), which are dyadic when y is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fsdpcheck.exact.surrogates import grids


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu"""
    real = x.double()
    return grids.now().activation.round(real * _gaussian(real, approximate)).to(x.dtype)


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu_backward"""
    real = x.double()
    density = torch.exp(-real.square() / 2) / math.sqrt(2 * math.pi)
    return grad * _slope(_gaussian(real, "none") + real * density, grad)


def silu(x: Tensor) -> Tensor:
    """aten::silu"""
    real = x.double()
    return grids.now().activation.round(real * _logistic(real)).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten::silu_backward"""
    real = x.double()
    share = _logistic(real)
    return grad * _slope(share * (1 + real * (1 - share)), grad)


def tanh(x: Tensor) -> Tensor:
    """aten::tanh"""
    return grids.now().tanh.round(_tanh(x.double())).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """aten::sigmoid"""
    return grids.now().sigmoid.round(_logistic(x.double())).to(x.dtype)


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` writing over its first argument."""

    def written(x: Tensor, **options: str) -> Tensor:
        return x.copy_(function(x, **options))

    return written


def out_variant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` writing to ``out``."""

    def written(x: Tensor, *, out: Tensor, **options: str) -> Tensor:
        return out.resize_(x.shape).copy_(function(x, **options))

    return written


def _slope(values: Tensor, grad: Tensor) -> Tensor:
    return grids.now().slope.round(values).to(grad.dtype)


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _tanh(x: Tensor) -> Tensor:
    return 2 / (1 + torch.exp(-2 * x)) - 1


def _gaussian(x: Tensor, approximate: str) -> Tensor:
    """Phi(x), or its usual approximation by tanh."""
    if approximate == "tanh":
        return 0.5 * (1 + _tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))
