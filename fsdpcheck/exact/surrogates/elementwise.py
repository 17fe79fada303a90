"""Activations on the grid: outputs and slopes are the true ones, rounded.

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


def mish(x: Tensor) -> Tensor:
    """aten::mish"""
    real = x.double()
    return grids.now().activation.round(real * _tanh(_softplus(real))).to(x.dtype)


def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten::mish_backward"""
    real = x.double()
    share = _tanh(_softplus(real))
    return grad * _slope(share + real * (1 - share.square()) * _logistic(real), grad)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """aten::softplus"""
    real = x.double() * beta
    return grids.now().activation.round(torch.where(real > threshold, real, _softplus(real)) / beta).to(x.dtype)


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """aten::softplus_backward"""
    real = x.double() * beta
    return grad * _slope(torch.where(real > threshold, 1.0, _logistic(real)), grad)


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    """aten::elu, which SELU is as well."""
    real = x.double()
    below = alpha * torch.expm1(input_scale * real)
    return grids.now().activation.round(scale * torch.where(real > 0, real, below)).to(x.dtype)


def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, given: Tensor
) -> Tensor:
    """aten::elu_backward; ``given``: what elu got, or its result where that was written over it."""
    real = given.double()
    below = real + alpha * scale if is_result else alpha * scale * torch.exp(input_scale * real)
    return grad * _slope(torch.where(real > 0, float(scale), input_scale * below), grad)


def celu(x: Tensor, alpha: float = 1) -> Tensor:
    """aten::celu"""
    return elu(x, alpha, 1, 1 / alpha)


def hardswish(x: Tensor) -> Tensor:
    """aten::hardswish"""
    real = x.double()
    return grids.now().activation.round(real * (real + 3).clamp(0, 6) / 6).to(x.dtype)


def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten::hardswish_backward"""
    real = x.double()
    return grad * _slope(torch.where(real <= -3, 0.0, torch.where(real < 3, real / 3 + 0.5, 1.0)), grad)


def hardsigmoid(x: Tensor) -> Tensor:
    """aten::hardsigmoid"""
    return grids.now().sigmoid.round((x.double() + 3).clamp(0, 6) / 6).to(x.dtype)


def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten::hardsigmoid_backward; its slope of 1/6 is a quarter, for on halves no gradient would pass."""
    return grad * torch.where(x.abs() < 3, 0.25, 0.0).to(grad.dtype)


def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """aten::log_sigmoid_forward; nobody needs its buffer."""
    return grids.now().log.round(-_softplus(-x.double())).to(x.dtype), x.new_zeros(0)


def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """aten::log_sigmoid_backward"""
    return grad * _slope(_logistic(-x.double()), grad)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """aten::glu, of exact pieces."""
    passed, gate = x.chunk(2, dim)
    return passed * torch.sigmoid(gate)


def tanh(x: Tensor) -> Tensor:
    """aten::tanh"""
    return grids.now().tanh.round(_tanh(x.double())).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """aten::sigmoid"""
    return grids.now().sigmoid.round(_logistic(x.double())).to(x.dtype)


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` writing over its first argument."""

    def written(x: Tensor, *more: float, **options: str) -> Tensor:
        return x.copy_(function(x, *more, **options))

    return written


def out_variant(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` writing to ``out``."""

    def written(x: Tensor, *more: float, out: Tensor, **options: str) -> Tensor:
        return out.resize_(x.shape).copy_(function(x, *more, **options))

    return written


def _slope(values: Tensor, grad: Tensor) -> Tensor:
    return grids.now().slope.round(values).to(grad.dtype)


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _tanh(x: Tensor) -> Tensor:
    return 2 / (1 + torch.exp(-2 * x)) - 1


def _gaussian(x: Tensor, approximate: str) -> Tensor:
    """Phi(x), or its usual approximation by tanh."""
    if approximate == "tanh":
        return 0.5 * (1 + _tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))
