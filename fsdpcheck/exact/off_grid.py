"""Values off every grid, on their way to a surrogate that rounds them to one: how far two computations may be apart.

The mean of squares of a norm, and the angles of a rotary embedding, take more bits than there are. Kernels may give
each other bits of them. What follows is a root or a cosine on a grid, and if every value within the error gives the
same one, nothing that comes after differs. So here each value has a bound on its relative error, by the usual model:
fl(a op b) = (a op b)(1 + d), |d| <= u (Higham, Accuracy and Stability of Numerical Algorithms, section 2.2). Numbers
that cancel have no such bound and are refused, as are those that may underflow.

Forward alone: a gradient never passes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.exact.operators import Inexact
from fsdpcheck.exact.wider_dtype import Wider

_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
"""Within these no dtype with float32's exponents underflows or overflows."""
_KERNEL = 4
"""Roundings that one elementwise operator may make in all, its constant's among them."""

MOVED: Final = frozenset({
    "view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "slice",
    "select", "split", "split_with_sizes", "unbind", "cat", "stack", "clone", "detach", "alias", "index",
    "index_select", "flip", "repeat", "_to_copy", "lift_fresh", "neg", "as_strided", "diagonal",
})  # fmt: skip
"""Operators that hand on such values as they are, but for a rounding to another dtype. None works in place, for what a
rule says of a value must be true of all who hold it."""
AWARE: Final = frozenset({"inverse_root", "root", "over_root", "cosine", "sine"})
"""Surrogates whose rule asks how far its operand may be off."""


class OffGrid:
    """The tensors with such values: for each its relative error, and what took it off the grid.

    ``bits``: of sums. ``wider``: the tensors of a dtype with ``bits_of_wider``, if there is one. What is not above
    ``masks`` stands for nothing.
    """

    def __init__(self, bits: int, wider: Wider | None = None, bits_of_wider: int = 0, masks: float = -math.inf) -> None:
        self.unit, self._wider, self._unit_of_wider = 2.0**-bits, wider, 2.0**-bits_of_wider
        self._masks = masks
        self._known: dict[int, tuple[float, str]] = {}
        self._alive: list[Tensor] = []

    def remember(self, result: Any, error: float, why: str) -> None:
        """By storage, which views of it share, and what autograd keeps of it; so the tensor is kept alive."""
        for tensor in _tensors([result]):
            self._alive.append(tensor)
            self._known[tensor.untyped_storage().data_ptr()] = (error, why)

    def found(self, values: Sequence[Any]) -> tuple[float, str] | None:
        """The worst of the values: (its relative error, why it is off the grid); None where all are on one."""
        known = [self._known.get(value.untyped_storage().data_ptr()) for value in _tensors(values) if value.numel()]
        return max((one for one in known if one is not None), default=None)

    def error(self, value: Any) -> float:
        """Relative error of one operand: 0 on a grid, a rounding for a tensor of constants that do not fit."""
        if not isinstance(value, Tensor):
            return 0.0
        unit = self._unit_of_wider if self._wider is not None and self._wider.holds(value) else self.unit
        known = self.found([value])
        if known is not None:
            return known[0]
        return 0.0 if _fits(value.masked_fill(value <= self._masks, 0.0), unit) else unit

    def cast(self, operand: Tensor, result: Tensor) -> None:
        """What a cast to the wider dtype gives of a tensor that few bits do not hold was rounded to them before."""
        if operand.is_floating_point() and (error := self.error(operand)):
            self.remember(result, error, "rounded to few bits before it is cast")

    def round(self, tensor: Tensor) -> None:
        """It is rounded once more, with all that shares its storage."""
        known = self._known.get(tensor.untyped_storage().data_ptr())
        if known is not None:
            self.remember(tensor, known[0] + 1.01 * self.unit, known[1])

    def _unit_of(self, operands: Sequence[Any]) -> float:
        wide = self._wider is not None and self._wider.computes(operands)
        return self._unit_of_wider if wide else self.unit

    def after(self, name: str, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> float:
        """The relative error of what an operator gives. Raises Inexact where there is no bound."""
        errors, unit = [self.error(value) for value in _flat(args)], self._unit_of(args)
        if name in MOVED and len(_tensors([result])) == len(_flat([result])):
            return 1.01 * (max(errors) + unit)
        rule = RULES.get(name)
        if rule is None or options:  # alpha, rounding_mode
            raise Inexact("has no bound on how far such values are off")
        if not all(map(_ordinary, _tensors([*args, result]))):
            raise Inexact("may underflow or overflow on values off every grid")
        return 1.01 * (rule(args, errors, unit) + _KERNEL * unit)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in _flat(values) if isinstance(value, Tensor) and value.is_floating_point()]


def _flat(values: Sequence[Any]) -> list[Any]:
    return [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]


def _fits(value: Tensor, unit: float) -> bool:
    """Whether every entry has a significand of no more bits than ``unit`` says."""
    scaled = torch.frexp(value.detach().double()).mantissa / unit
    return bool((scaled == scaled.round()).all())


def _ordinary(value: Tensor) -> bool:
    size = value.detach().double().abs()
    return bool(((size == 0) | ((size >= _SMALLEST) & (size <= _LARGEST))).all())


# -- rules: (operands, their errors, unit) -> the error of the exact result of such operands -------------------------

_Rule = Callable[[Sequence[Any], Sequence[float], float], float]
RULES: Final[dict[str, _Rule]] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule("mul", "div", "reciprocal")
def _products(args: Sequence[Any], errors: Sequence[float], unit: float) -> float:
    return sum(errors)


@_rule("add")
def _additions(args: Sequence[Any], errors: Sequence[float], unit: float) -> float:
    one, two = (value.detach() if isinstance(value, Tensor) else torch.tensor(float(value)) for value in args[:2])
    if bool((one * two < 0).any()):
        raise Inexact("adds up values of both signs, off every grid")
    return max(errors)


@_rule("pow")
def _power(args: Sequence[Any], errors: Sequence[float], unit: float) -> float:
    base, power = args[:2]
    if isinstance(base, Tensor) and power in (2, 3):
        return float(power) * errors[0]
    if isinstance(power, Tensor) and not isinstance(base, Tensor) and base > 0:
        return float((power.detach().abs().max() if power.numel() else 0.0) * abs(math.log(base)) * errors[1])
    raise Inexact("takes such a power of values off every grid")


@_rule("sum", "mean")
def _sums(args: Sequence[Any], errors: Sequence[float], unit: float) -> float:
    value: Tensor = args[0].detach()
    if bool((value < 0).any()) and bool((value > 0).any()):
        raise Inexact("adds up values of both signs, off every grid")
    dims = args[1] if len(args) > 1 and args[1] else range(value.dim())
    return errors[0] + math.prod(value.shape[dim] for dim in dims) * unit


@_rule("mm", "bmm")
def _outer(args: Sequence[Any], errors: Sequence[float], unit: float) -> float:
    if args[0].shape[-1] != 1:
        raise Inexact("adds up products off every grid")
    return sum(errors)
