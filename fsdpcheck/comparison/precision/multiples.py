"""Numbers as multiples of a power of two: how many bits those of a tensor have together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

SHORT: Final = 12
"""Bits of a number that is taken as it is given: half of those that a float32 has. One that has more may be rounded by
what no mode sees, of Python or of numpy, in its own way on each number of ranks."""
_HELD: Final = 52
_SMALLEST, _LARGEST = -900, 900
"""Exponents between which nothing overflows or underflows."""


class Multiple(NamedTuple):
    """Numbers that are multiples of 2**unit, of absolute value ``top`` at most."""

    top: float
    unit: int


class Unproved(Exception):
    """Nothing is known of a value."""


def multiple(value: Any) -> Multiple:
    """Raises Unproved for what is not finite, is of a type that rounds, or is a number of Python with many bits."""
    if isinstance(value, int | float):
        if not is_held(value):
            raise Unproved
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta or not is_held(value):
        raise Unproved
    is_whole, value = not value.is_floating_point(), value.detach().double()
    if not value.numel():
        return Multiple(0.0, _LARGEST)
    top = float(value.abs().max())
    if not math.isfinite(top) or (is_whole and top >= 2.0**53):
        raise Unproved
    return Multiple(top, _unit(value[value != 0])) if top else Multiple(0.0, _LARGEST)


def is_short(tensor: Tensor) -> bool:
    """Whether its numbers have few bits, each by itself; infinite ones have."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return not tensor.is_complex()
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    significands = odd(tensor[tensor.isfinite()].double())
    return not significands.numel() or int(significands.max()) < 1 << SHORT


def is_held(value: Any) -> bool:
    """Whether a value that is moved or compared is what it is in float64 too."""
    if isinstance(value, Tensor):
        return value.dtype is torch.float64 or not value.is_floating_point()
    if isinstance(value, int):
        return abs(value) < 2**53
    return math.isinf(value) or is_short(torch.tensor(value, dtype=torch.float64))


def _unit(values: Tensor) -> int:
    significand, exponent = torch.frexp(values)
    whole = (significand * 2.0**53).to(torch.int64)
    return int((exponent - 54 + torch.frexp((whole & -whole).double())[1]).min())


def odd(values: Tensor) -> Tensor:
    """Of each number that is not zero, the odd integer that it is a power of two times, without its sign."""
    whole = (torch.frexp(values[values != 0])[0].abs() * 2.0**53).to(torch.int64)
    return whole // (whole & -whole) if whole.numel() else whole


def product(*factors: Multiple) -> Multiple:
    """What products of such numbers are."""
    if any(not factor.top for factor in factors):
        return Multiple(0.0, _LARGEST)
    return Multiple(math.prod(factor.top for factor in factors), sum(factor.unit for factor in factors))


def fit(terms: Sequence[Multiple]) -> bool:
    """Whether such numbers, one of each, are added exactly in any order."""
    terms = [term for term in terms if term.top]
    if not terms:
        return True
    unit, top = min(term.unit for term in terms), sum(term.top for term in terms)
    return _SMALLEST < unit < _LARGEST and top < 2.0**_LARGEST and math.ldexp(top, -unit) <= 2.0**_HELD


def is_power(number: int) -> bool:
    """Whether it is a power of two."""
    return number > 0 and not number & (number - 1)
