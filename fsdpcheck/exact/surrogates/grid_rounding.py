"""Rounding real function values to a dyadic grid so that everybody who rounds the same value gets the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHIFT = 0.45
"""A value on the grid's half-steps stays clear of the decision: round at the fraction 0.55, not at a tie. Inputs are
dyadic, and where a function is close to the identity its values are too."""
_CLEAR = 1e-6
"""How far from a decision a value must be, in grid steps: kernels of exp and erf differ by a few 1e-16 of a value."""


@dataclass
class Doubts:
    """``count``: values so far that stood within 1e-6 of a decision, so that another kernel might round them away."""

    count: int = 0


doubts = Doubts()
"""Of the whole process. A run in which the count moved proves nothing; whoever draws must reject it."""


def to_grid(values: Tensor, bits: int, low: float, high: float, shift: float = SHIFT) -> Tensor:
    """Float64 ``values`` as multiples of 2**-bits within [low, high]; counts those too near a decision.

    NaN stays NaN: a poisoned input must be seen, not rounded away.
    """
    steps = values * 2.0**bits + shift
    fraction = steps - steps.floor()
    inside = (values > low) & (values < high)
    near = (fraction < _CLEAR) | (fraction > 1 - _CLEAR)
    doubts.count += int((near & inside).sum())
    return constant_to_grid(values, bits, low, high, shift)


def constant_to_grid(values: Tensor, bits: int, low: float, high: float, shift: float = SHIFT) -> Tensor:
    """The same of values that nobody computes again, and of which none is in doubt."""
    return ((values * 2.0**bits + shift).floor() * 2.0**-bits).clamp(low, high)


def power_of_two(values: Tensor, low: int, high: int) -> Tensor:
    """A power of two within a factor 1.6 of each positive value, its exponent within [low, high]; counts doubts too.

    The decision lies beside the powers of two, on which standard deviations of integers like to be.
    """
    mantissa, exponent = torch.frexp(values * 1.6)
    near = ((mantissa - 0.5).abs() < _CLEAR) | ((mantissa - 1).abs() < _CLEAR)
    doubts.count += int((near & (exponent - 1 > low - 1) & (exponent - 1 < high + 1)).sum())
    return torch.ldexp(torch.ones_like(values), (exponent - 1).clamp(low, high))
