"""What the surrogates do to exactness: rules of ``operators.RULES`` for operators that only they make exact.

Outputs lie on the surrogate's own grid whatever the input; backwards are linear in the cotangent with coefficients on a
grid. Statistics of norms are float64 sums in every arithmetic, so they have 53 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.exact import surrogates
from fsdpcheck.exact.grid import bits, grid_exponent
from fsdpcheck.exact.operators import RULES, Bound, Inexact, Operand, Rule
from fsdpcheck.exact.surrogates import grids, normalisation, spelled_out

_aten = torch.ops.aten
_own = torch.ops.fsdpcheck
_STATISTICS = 53
_TWICE = 2
"""A value that is looked at is off as another is: they are apart by both errors."""


def _surrogate(*overloads: Any) -> Callable[[Rule], Rule]:
    """Register a rule that holds only while the surrogates are in place."""

    def register(rule: Rule) -> Rule:
        def guarded(*operands: Any, **named: Any) -> Sequence[Bound | None]:
            if not surrogates.active():
                raise Inexact("leaves every grid; next: draw with surrogates, or use the tier of real numbers")
            return rule(*operands, **named)

        RULES.update(dict.fromkeys(overloads, guarded))
        return rule

    return register


def _values(x: Operand, grid: grids.Grid) -> Sequence[Bound]:
    return [Bound(torch.full_like(x.magnitude, grid.largest), -grid.bits)]


@_surrogate(
    *(
        getattr(_aten, f"{name}{in_place}").default
        for name in ("gelu", "silu", "elu", "celu", "hardswish", "mish")
        for in_place in ("", "_")
    ),
    _aten.softplus.default,
)
def _activation(x: Operand, *_: float, **__: Any) -> Sequence[Bound]:
    return _values(x, grids.now().activation)


@_surrogate(_aten.log_sigmoid_forward.default)
def _log_sigmoid(x: Operand) -> Sequence[Bound | None]:
    return [*_values(x, grids.now().log), None]


@_surrogate(_aten.tanh.default, _aten.tanh_.default)
def _tanh(x: Operand) -> Sequence[Bound]:
    return _values(x, grids.now().tanh)


@_surrogate(_aten.sigmoid.default, _aten.sigmoid_.default, _aten.hardsigmoid.default, _aten.hardsigmoid_.default)
def _sigmoid(x: Operand) -> Sequence[Bound]:
    return _values(x, grids.now().sigmoid)


@_surrogate(
    *(
        getattr(_aten, f"{name}_backward").default
        for name in ("gelu", "silu", "elu", "softplus", "mish", "hardswish", "log_sigmoid")
    )
)
def _activation_backward(grad: Operand, *_: Any, **__: Any) -> Sequence[Bound]:
    slope = grids.now().slope
    return [Bound(grad.magnitude * slope.largest, grad.exponent - slope.bits)]


@_surrogate(_aten.hardsigmoid_backward.default)
def _hardsigmoid_backward(grad: Operand, x: Operand) -> Sequence[Bound]:
    return [Bound(grad.magnitude / 4, grad.exponent - 2)]


@_surrogate(_aten.tanh_backward.default)
def _tanh_backward(grad: Operand, y: Operand) -> Sequence[Bound]:
    return [Bound(grad.magnitude * (1 + y.magnitude.square()), grad.exponent + min(0, 2 * y.exponent))]


@_surrogate(_aten.sigmoid_backward.default)
def _sigmoid_backward(grad: Operand, y: Operand) -> Sequence[Bound]:
    return [Bound(grad.magnitude * (1 + y.magnitude) * y.magnitude, grad.exponent + min(0, y.exponent) + y.exponent)]


@_surrogate(_aten._softmax.default)
def _softmax(x: Operand, dim: int, half_to_float: bool) -> Sequence[Bound]:
    return _values(x, grids.now().softmax)


@_surrogate(_aten._softmax_backward_data.default)
def _softmax_backward(grad: Operand, p: Operand, dim: int, dtype: Any) -> Sequence[Bound]:
    products = grad.magnitude * p.magnitude
    terms = (grad.magnitude + products.sum(dim, keepdim=True)) * p.magnitude
    return [Bound(terms, grad.exponent + min(0, p.exponent) + p.exponent)]


@_surrogate(_aten._log_softmax.default)
def _log_softmax(x: Operand, dim: int, half_to_float: bool) -> Sequence[Bound]:
    return _values(x, grids.now().log)


@_surrogate(_aten._log_softmax_backward_data.default)
def _log_softmax_backward(grad: Operand, y: Operand, dim: int, dtype: Any) -> Sequence[Bound]:
    return [Bound(grad.magnitude + grad.magnitude.sum(dim, keepdim=True), grad.exponent - grids.now().loss.bits)]


def _layer_norm(
    x: Operand, shape: list[int], weight: Operand | None, bias: Operand | None, eps: float
) -> Sequence[Bound | None]:
    _exact_statistics(x, math.prod(shape))
    return [_affine(x, weight, bias), None, None]


def _layer_norm_backward(
    grad: Operand, x: Operand, shape: list[int], mean: Any, rstd: Any, weight: Operand | None, bias: Any, mask: Any
) -> Sequence[Bound | None]:
    rows = Operand(grad.magnitude.reshape(-1, math.prod(shape)), grad.exponent)
    scaled = rows if weight is None else _times(rows, weight, weight.magnitude.reshape(-1))
    normal = grids.now().normal
    of_input = Bound(_pulled_back(scaled).reshape(x.magnitude.shape), _pulled_exponent(scaled))
    summed = rows.magnitude.sum(0).reshape(shape)
    return [of_input, Bound(summed * normal.largest, grad.exponent - normal.bits),
            Bound(summed, grad.exponent)]  # fmt: skip


def _balanced_layer_norm(
    x: Operand, shape: list[int], weight: Operand | None, bias: Operand | None, eps: float
) -> Sequence[Bound | None]:
    """torch's own kernel is exact on balanced rows, half +2**k and half -2**k, without eps: what it gives is +-1."""
    assert x.value is not None
    for value in {x.value, x.value if x.bits == 53 else x.value.float()}:
        output, mean, rstd = _aten.native_layer_norm.default(value, shape, None, None, eps)
        if bool((mean != 0).any() or (rstd.frexp().mantissa != 0.5).any() or (output.abs() != 1).any()):
            raise Inexact("leaves the grid; next: draw with surrogates, or use the tier of real numbers")
    return [_affine(x, weight, bias), None, None]


def _balanced_layer_norm_backward(
    grad: Operand, x: Operand, shape: list[int], mean: Any, rstd: Any, weight: Operand | None, bias: Any, mask: Any
) -> Sequence[Bound | None]:
    if mask[0]:
        raise Inexact("hands a gradient to its input; next: draw with surrogates, or use the tier of real numbers")
    return _layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask)


def _either(with_surrogates: Rule, without: Rule) -> Rule:
    return lambda *operands, **named: (with_surrogates if surrogates.active() else without)(*operands, **named)


RULES[_aten.native_layer_norm.default] = _either(_layer_norm, _balanced_layer_norm)
RULES[_aten.native_layer_norm_backward.default] = _either(_layer_norm_backward, _balanced_layer_norm_backward)


@_surrogate(_aten.native_group_norm.default)
def _group_norm(
    x: Operand, weight: Operand | None, bias: Operand | None, n: int, channels: int, area: int, groups: int, eps: float
) -> Sequence[Bound | None]:
    _exact_statistics(x, channels * area // groups)
    affine = [None if value is None else _by_channel(value, x) for value in (weight, bias)]
    return [_affine(x, *affine), None, None]


@_surrogate(_aten.native_group_norm_backward.default)
def _group_norm_backward(
    grad: Operand, x: Operand, mean: Any, rstd: Any, weight: Operand | None, n: int, channels: int, area: int,
    groups: int, mask: Any,
) -> Sequence[Bound | None]:  # fmt: skip
    scaled = grad if weight is None else _times(grad, weight, _by_channel(weight, x).magnitude)
    rows = Operand(scaled.magnitude.reshape(n * groups, channels // groups * area), scaled.exponent)
    normal = grids.now().normal
    of_input = Bound(_pulled_back(rows).reshape(x.magnitude.shape), _pulled_exponent(rows))
    summed = grad.magnitude.reshape(n, channels, area).sum((0, 2))
    return [of_input, Bound(summed * normal.largest, grad.exponent - normal.bits),
            Bound(summed, grad.exponent)]  # fmt: skip


@_surrogate(_own.rms_xhat.default)
def _rms(x: Operand, count: int, eps: float) -> Sequence[Bound]:
    _exact_statistics(x, count)
    return _values(x, grids.now().normal)


@_surrogate(_own.rms_xhat_backward.default)
def _rms_backward(grad: Operand, x: Operand, count: int, eps: float) -> Sequence[Bound]:
    rows = Operand(grad.magnitude.reshape(-1, count), grad.exponent)
    return [Bound(_pulled_back(rows).reshape(x.magnitude.shape), _pulled_exponent(rows))]


@_surrogate(_own.inverse_root.default)
def _inverse_root(x: Operand) -> Sequence[Bound]:
    return _power_of_two(x, spelled_out.inverse_root)


@_surrogate(_own.root.default)
def _root(x: Operand) -> Sequence[Bound]:
    return _power_of_two(x, spelled_out.root)


def _power_of_two(x: Operand, function: Callable[[Tensor], Tensor]) -> Sequence[Bound]:
    """Roots fall or rise all the way: what both ends of an interval give, all of it gives."""
    assert x.value is not None
    value = x.value.detach()
    if not bool((value > 0).all()):
        raise Inexact("takes the root of a number that is not positive")
    least, most = (function(value * (1 + sign * _TWICE * x.error)) for sign in (-1, 1))
    if not torch.equal(least, most):
        raise Inexact("takes the root of a number that rounding may take across a decision")
    return [Bound(least, grid_exponent(least))]


@_surrogate(_own.over_root.default)
def _over_root(x: Operand, squares: Operand) -> Sequence[Bound]:
    assert x.value is not None
    assert squares.value is not None
    if not bool((squares.value > 0).all()):
        raise Inexact("takes the root of a number that is not positive")
    off = _TWICE * (x.error + squares.error)
    least, most = (spelled_out.over_root(x.value.detach() * (1 + sign * off), squares.value) for sign in (-1, 1))
    if not torch.equal(least, most):
        raise Inexact("normalises a number that rounding may take across a decision")
    return _values(x, grids.now().normal)


@_surrogate(_own.share.default)
def _share(x: Operand, total: Operand) -> Sequence[Bound]:
    return _values(x, grids.now().share)


@_surrogate(_own.inverse.default)
def _inverse(total: Operand) -> Sequence[Bound]:
    return [Bound(torch.full_like(total.magnitude, 2.0 ** spelled_out.INVERSES[1]), spelled_out.INVERSES[0])]


@_surrogate(_own.cosine.default)
def _cosine(x: Operand) -> Sequence[Bound]:
    return _turned(x, torch.cos)


@_surrogate(_own.sine.default)
def _sine(x: Operand) -> Sequence[Bound]:
    return _turned(x, torch.sin)


def _turned(x: Operand, function: Callable[[Tensor], Tensor]) -> Sequence[Bound]:
    """A cosine moves by no more than its angle does."""
    assert x.value is not None
    true, off = function(x.value.detach()), _TWICE * x.error * x.magnitude
    least, most = (grids.now().turn.round(true + sign * off) for sign in (-1, 1))
    if not torch.equal(least, most):
        raise Inexact("takes the cosine of an angle that rounding may take across a decision")
    return _values(x, grids.now().turn)


def _exact_statistics(x: Operand, count: int) -> None:
    """The sums of inputs and of their squares must be exact in float64, or rows would have other statistics."""
    rows = x.magnitude.reshape(-1, count)
    largest = float((rows.square().sum(1) * count).max()) if rows.numel() else 0.0
    if bits(largest, 2 * x.exponent) > _STATISTICS:
        raise Inexact(f"adds up squares that take more than {_STATISTICS} bits")


def _affine(x: Operand, weight: Operand | None, bias: Operand | None) -> Bound:
    """xhat * weight + bias."""
    normal = grids.now().normal
    terms, exponent = torch.full_like(x.magnitude, normal.largest), -normal.bits
    if weight is not None:
        terms, exponent = terms * weight.magnitude, exponent + weight.exponent
    if bias is not None:
        terms, exponent = terms + bias.magnitude, min(exponent, bias.exponent)
    return Bound(terms, exponent)


def _times(rows: Operand, weight: Operand, magnitude: Tensor) -> Operand:
    return Operand(rows.magnitude * magnitude, rows.exponent + weight.exponent)


def _by_channel(value: Operand, x: Operand) -> Operand:
    return Operand(value.magnitude.reshape(1, -1, *[1] * (x.magnitude.dim() - 2)), value.exponent)


def _pulled_back(rows: Operand) -> Tensor:
    """r (h + m(h) + xhat m(h xhat)) at the largest r and xhat; m is at most the sum times a power of two."""
    if grids.now().hands_on:
        return rows.magnitude
    summed = rows.magnitude.sum(1, keepdim=True) * normalisation.dyadic_share(rows.magnitude.shape[1])
    most = 2.0 ** normalisation.INVERSE_STD[1]
    found: Tensor = most * (rows.magnitude + summed * (1 + grids.now().normal.largest ** 2))
    return found


def _pulled_exponent(rows: Operand) -> int:
    if grids.now().hands_on:
        return rows.exponent
    count = rows.magnitude.shape[1]
    share = round(math.log2(normalisation.dyadic_share(count)))
    return rows.exponent + normalisation.INVERSE_STD[0] - 2 * grids.now().normal.bits + share
