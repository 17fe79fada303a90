"""What convolutions, pools and other windows over positions do to exactness; see ``operators``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpcheck.exact.operators import Bound, Inexact, Operand, Rule, rule

_aten = torch.ops.aten


@rule(_aten.upsample_nearest1d_backward.default, _aten.upsample_nearest2d_backward.default)
def _nearest_backward(grad: Operand, output: Any, size: Any, *scales: Any) -> Sequence[Bound]:
    function = _aten.upsample_nearest1d_backward if len(size) == 3 else _aten.upsample_nearest2d_backward
    return [Bound(function.default(grad.magnitude, output, size, *scales), grad.exponent)]


@rule(_aten.col2im.default)
def _windows_added(a: Operand, *geometry: Any) -> Sequence[Bound]:
    return [Bound(_aten.col2im.default(a.magnitude, *geometry), a.exponent)]


def _copies_added(function: Any) -> Rule:
    """Of a padding with copies of the input: what comes back to them is added up."""

    def bound(grad: Operand, x: Operand, *geometry: Any) -> Sequence[Bound]:
        return [Bound(function.default(grad.magnitude, x.magnitude, *geometry), grad.exponent)]

    return bound


for _backward in (
    _aten.reflection_pad1d_backward, _aten.reflection_pad2d_backward, _aten.reflection_pad3d_backward,
    _aten.replication_pad1d_backward, _aten.replication_pad2d_backward, _aten.replication_pad3d_backward,
):  # fmt: skip
    rule(_backward.default)(_copies_added(_backward))


@rule(_aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(grad: Operand, x: Operand, *rest: Any) -> Sequence[Bound]:
    found = _aten.max_pool2d_with_indices_backward.default(grad.magnitude, x.magnitude, *rest)
    return [Bound(found, grad.exponent)]


@rule(_aten.avg_pool2d.default)
def _average_pool(x: Operand, window: Sequence[int], *options: Any) -> Sequence[Bound]:
    count = _pooled(window, *options)
    found = _aten.avg_pool2d.default(x.magnitude, window, *options)
    return [Bound(found * count, x.exponent - count.bit_length() + 1)]


@rule(_aten.avg_pool2d_backward.default)
def _average_pool_backward(grad: Operand, x: Operand, window: Sequence[int], *options: Any) -> Sequence[Bound]:
    count = _pooled(window, *options)
    found = _aten.avg_pool2d_backward.default(grad.magnitude, x.magnitude, window, *options)
    return [Bound(found * count, grad.exponent - count.bit_length() + 1)]


def _pooled(
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> int:
    """How many values each mean is of, which is a power of two. Raises Inexact."""
    count = window[0] * window[-1] if divisor is None else divisor
    if ceil_mode or (any(padding) and not count_include_pad and divisor is None):
        raise Inexact("takes means of unequal numbers of values")
    if count & (count - 1):
        raise Inexact(f"takes the mean of {count} values, which is no power of two")
    return int(count)


@rule(_aten.convolution.default)
def _convolution(x: Operand, weight: Operand, bias: Operand | None, *geometry: Any) -> Sequence[Bound]:
    terms = _aten.convolution.default(x.magnitude, weight.magnitude, None, *geometry)
    exponent = x.exponent + weight.exponent
    if bias is not None:
        shape = [1, -1, *[1] * (terms.dim() - 2)]
        terms, exponent = terms + bias.magnitude.reshape(shape), min(exponent, bias.exponent)
    return [Bound(terms, exponent)]


@rule(_aten.convolution_backward.default)
def _convolution_backward(grad: Operand, x: Operand, weight: Operand, *rest: Any) -> Sequence[Bound | None]:
    found = _aten.convolution_backward.default(grad.magnitude, x.magnitude, weight.magnitude, *rest)
    exponents = (grad.exponent + weight.exponent, grad.exponent + x.exponent, grad.exponent)
    pairs = zip(found, exponents, strict=True)
    return [None if terms is None else Bound(terms, exponent) for terms, exponent in pairs]
