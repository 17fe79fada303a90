"""What each operator of torch does to exactness: one table, by overload, which fails closed.

A rule takes the operands' magnitudes (absolute values, or bounds on them) and grid exponents, and gives for each result
the largest sum of absolute terms that any order of computing it can meet, and the exponent of the grid that all its
partial sums lie on. The theorem behind it stands in ``fsdpcheck.oracle.certificate``. An operator that is not in the
table has no rule, and whoever met it must refuse: that is a limit of the table, never a pass.

Kinds: ``MOVES`` only copy, drop or zero values; ``LOGICAL`` give no floating-point values; ``RULES`` compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.exact.grid import EMPTY

Function = Callable[..., Any]


@dataclass(frozen=True)
class Bound:
    """Bound on the absolute terms of each entry of one result, and the grid exponent of the terms."""

    terms: Tensor
    exponent: int


@dataclass(frozen=True)
class Operand:
    """A floating-point operand: its magnitudes and grid exponent.

    ``value`` and ``bits`` are the value itself and the significand of its arithmetic, for rules that depend on them;
    ``error`` is how far the value may be off, relative to it (exact/off_grid.py).
    """

    magnitude: Tensor
    exponent: int
    value: Tensor | None = None
    bits: int = 53
    error: float = 0.0


Rule = Callable[..., Sequence[Bound | None]]
"""Called like the operator, with an Operand in the place of each floating-point tensor; None for a result that is
exact whatever it is (integers), or that nobody may use."""


class Inexact(Exception):
    """An operator that no grid holds; the text goes on from its name."""


_aten = torch.ops.aten

MOVES: Final[frozenset[Function]] = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overloads in {
        "view": "default", "_unsafe_view": "default", "_reshape_alias": "default", "t": "default", "unfold": "default",
        "transpose": "int", "permute": "default", "expand": "default", "squeeze": "default dim dims",
        "unsqueeze": "default", "slice": "Tensor", "select": "int", "split": "Tensor", "split_with_sizes": "default",
        "unbind": "int", "cat": "default", "stack": "default", "clone": "default", "detach": "default",
        "alias": "default", "index": "Tensor", "index_select": "default", "gather": "default", "flip": "default",
        "_to_copy": "default", "zeros_like": "default", "ones_like": "default", "new_zeros": "default",
        "new_ones": "default", "zeros": "default", "ones": "default", "full": "default", "full_like": "default",
        "scalar_tensor": "default", "empty_like": "default", "new_empty": "default",
        "new_empty_strided": "default", "index_fill": "int_Scalar int_Tensor", "index_fill_": "int_Scalar int_Tensor",
        "eye": "default m",
        "tril": "default", "triu": "default", "roll": "default", "pixel_shuffle": "default",
        "pixel_unshuffle": "default", "im2col": "default", "upsample_nearest1d": "default vec",
        "upsample_nearest2d": "default vec", "upsample_nearest3d": "default vec", "unsafe_split": "Tensor",
        "unsafe_split_with_sizes": "default", "transpose_": "default", "t_": "default", "unsqueeze_": "default",
        "constant_pad_nd": "default", "reflection_pad1d": "default", "reflection_pad2d": "default",
        "reflection_pad3d": "default", "replication_pad1d": "default", "replication_pad2d": "default",
        "replication_pad3d": "default", "slice_backward": "default", "select_backward": "default",
        "diagonal_backward": "default",
        "embedding": "default", "where": "self", "masked_fill": "Scalar Tensor", "masked_fill_": "Scalar Tensor",
        "relu": "default", "relu_": "default", "hardshrink": "default", "hardshrink_backward": "default",
        "clamp": "default", "clamp_": "default", "clamp_min": "default", "clamp_min_": "default",
        "clamp_max": "default", "clamp_max_": "default", "hardtanh": "default", "hardtanh_": "default",
        "threshold_backward": "default", "hardtanh_backward": "default", "abs": "default", "neg": "default",
        "neg_": "default", "sign": "default", "sgn": "default",
        "maximum": "default", "minimum": "default", "amax": "default", "amin": "default", "lift_fresh": "default",
        "max_pool2d_with_indices": "default", "copy_": "default", "fill_": "Scalar Tensor", "zero_": "default",
        "floor": "default", "ceil": "default", "round": "default", "remainder": "Scalar",
        "squeeze_": "dim dims default",
        "as_strided": "default", "expand_as": "default", "diagonal": "default", "repeat": "default",
        "sort": "stable", "max": "dim", "min": "dim",
        "view_as_complex": "default", "view_as_real": "default",
    }.items()
    for overload in overloads.split()
    if hasattr(getattr(_aten, name), overload)
)  # fmt: skip

COMPLEX: Final[frozenset[str]] = frozenset({
    "view_as_complex", "view_as_real", "view", "slice", "select", "unsqueeze", "squeeze", "expand", "index",
    "index_select", "transpose", "permute", "detach", "alias", "clone", "_to_copy", "lift_fresh", "slice_backward",
    "select_backward",
})  # fmt: skip
"""Names of the moves that complex numbers may take part in: what computes is in real numbers."""

LOGICAL: Final[frozenset[str]] = frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_not", "bitwise_and",
        "arange", "argmax", "argsort", "sort", "isnan", "isfinite", "any", "all", "triu", "tril",
        "nonzero", "_local_scalar_dense", "item", "cumsum", "bincount",
    }
)  # fmt: skip
"""Names of operators allowed where no result is a floating-point tensor."""

RULES: Final[dict[Function, Rule]] = {}


def rule(*overloads: Function) -> Callable[[Rule], Rule]:
    """Register a rule for these operators."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads, found))
        return found

    return register


def constant(value: float | Tensor | Operand) -> Operand:
    """A Python number, or a tensor of integers or flags, as an operand; an operand as it is."""
    if isinstance(value, Operand):
        return value
    if isinstance(value, Tensor):
        return Operand(value.double().abs(), 0 if bool(value.any()) else EMPTY)
    mantissa, exponent = math.frexp(float(value))
    if value == 0:
        return Operand(torch.zeros(()), EMPTY)
    whole = int(abs(mantissa) * 2**53)
    return Operand(
        torch.tensor(abs(float(value)), dtype=torch.float64), exponent - 53 + (whole & -whole).bit_length() - 1
    )


# -- elementwise ------------------------------------------------------------------------------------------------------


def _sum(a: Operand | float, b: Operand | float, alpha: float = 1) -> Sequence[Bound]:
    one, two, factor = constant(a), constant(b), constant(alpha)
    return [Bound(one.magnitude + two.magnitude * factor.magnitude, min(one.exponent, two.exponent + factor.exponent))]


def _product(a: Operand | float, b: Operand | float) -> Sequence[Bound]:
    one, two = constant(a), constant(b)
    return [Bound(one.magnitude * two.magnitude, one.exponent + two.exponent)]


@rule(_aten.add.Tensor, _aten.sub.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.add.Scalar, _aten.sub.Scalar)
def _add(a: Operand, b: Operand | float, alpha: float = 1) -> Sequence[Bound]:
    return _sum(a, b, alpha)


@rule(_aten.rsub.Scalar, _aten.rsub.Tensor)
def _reversed_sub(a: Operand, b: Operand | float, alpha: float = 1) -> Sequence[Bound]:
    return _sum(b, a, alpha)


@rule(_aten.mul.Tensor, _aten.mul.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar)
def _mul(a: Operand, b: Operand | float) -> Sequence[Bound]:
    return _product(a, b)


@rule(_aten.div.Tensor, _aten.div.Scalar, _aten.div_.Tensor, _aten.div_.Scalar)
def _div(a: Operand, b: Operand | float) -> Sequence[Bound]:
    divisor = constant(b)
    mantissa, _ = torch.frexp(divisor.magnitude)
    if not bool((mantissa == 0.5).all()):
        raise Inexact("divides by a number that is no power of two")
    inverse = 1 / divisor.magnitude
    return _product(a, Operand(inverse, -int(torch.frexp(divisor.magnitude).exponent.max()) + 1))


@rule(_aten.pow.Tensor_Scalar)
def _pow(a: Operand, power: float) -> Sequence[Bound]:
    if power not in (1, 2, 3):
        raise Inexact(f"takes the power {power}")
    return [Bound(a.magnitude**power, a.exponent * int(power))]


@rule(_aten.leaky_relu.default)
def _leaky(a: Operand, slope: float = 0.01) -> Sequence[Bound]:
    scaled = constant(slope)
    return [Bound(a.magnitude * max(1.0, abs(slope)), a.exponent + min(0, scaled.exponent))]


@rule(_aten.leaky_relu_backward.default)
def _leaky_backward(grad: Operand, a: Operand, slope: float, is_result: bool) -> Sequence[Bound | None]:
    return _leaky(grad, slope)


@rule(_aten._prelu_kernel.default)
def _prelu(x: Operand, weight: Operand) -> Sequence[Bound | None]:
    return [Bound(x.magnitude * weight.magnitude.clamp(min=1), x.exponent + min(0, weight.exponent))]


@rule(_aten._prelu_kernel_backward.default)
def _prelu_backward(grad: Operand, x: Operand, weight: Operand) -> Sequence[Bound | None]:
    (to_x,), (to_weight,) = _prelu(grad, weight), _product(grad, x)
    return [to_x, to_weight]


@rule(_aten.addcmul.default, _aten.addcmul_.default)
def _addcmul(a: Operand, b: Operand, c: Operand, value: float = 1) -> Sequence[Bound]:
    (product,) = _product(b, c)
    return _sum(a, Operand(product.terms, product.exponent), value)


# -- sums -------------------------------------------------------------------------------------------------------------


@rule(_aten.sum.default)
def _sum_all(a: Operand, dtype: Any = None) -> Sequence[Bound]:
    return [Bound(a.magnitude.sum(), a.exponent)]


@rule(_aten.sum.dim_IntList)
def _sum_dim(a: Operand, dim: Any, keepdim: bool = False, dtype: Any = None) -> Sequence[Bound]:
    return [Bound(a.magnitude.sum(dim, keepdim), a.exponent)]


@rule(_aten.cumsum.default)
def _cumulated(a: Operand, dim: int, dtype: Any = None) -> Sequence[Bound]:
    return [Bound(a.magnitude.cumsum(dim), a.exponent)]


@rule(_aten.mean.default, _aten.mean.dim)
def _mean(a: Operand, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Sequence[Bound]:
    total = a.magnitude.sum() if dim is None else a.magnitude.sum(dim, keepdim)
    count = a.magnitude.numel() // max(total.numel(), 1)
    if count & (count - 1):
        raise Inexact(f"takes the mean of {count} values, which is no power of two")
    return [Bound(total, a.exponent - max(count.bit_length() - 1, 0))]


@rule(_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default)
def _matmul(a: Operand, b: Operand) -> Sequence[Bound]:
    return [_matrix_product(a, b)]


def _matrix_product(a: Operand, b: Operand) -> Bound:
    return Bound(a.magnitude @ b.magnitude, a.exponent + b.exponent)


@rule(_aten.addmm.default, _aten.baddbmm.default, _aten.addmv.default)
def _add_matmul(c: Operand, a: Operand, b: Operand, beta: float = 1, alpha: float = 1) -> Sequence[Bound]:
    product = _matrix_product(a, b)
    return _sum(scaled(c, beta), scaled(Operand(product.terms, product.exponent), alpha))


def scaled(a: Operand, factor: float) -> Operand:
    """Times a number."""
    (found,) = _product(a, factor)
    return Operand(found.terms, found.exponent)


@rule(_aten.nll_loss_forward.default)
def _nll(x: Operand, target: Tensor, weight: None, reduction: int, ignore: int) -> Sequence[Bound | None]:
    _sum_only(weight, reduction)
    return [Bound(_aten.nll_loss_forward.default(-x.magnitude, target, None, reduction, ignore)[0], x.exponent), None]


@rule(_aten.nll_loss_backward.default)
def _nll_backward(
    grad: Operand, x: Operand, target: Tensor, weight: None, reduction: int, ignore: int, total: Any
) -> Sequence[Bound]:
    _sum_only(weight, reduction)
    return [Bound(grad.magnitude.max().expand(x.magnitude.shape), grad.exponent)]


def _sum_only(weight: Any, reduction: int) -> None:
    if weight is not None or reduction == 1:
        raise Inexact("is a cross-entropy with class weights or a mean; sums of it are exact")
