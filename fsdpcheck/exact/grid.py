"""Grids of dyadic numbers: every entry of a tensor is an integer times 2**exponent. All results are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsdpcheck.errors import NotExact

_FRACTION = 30
EMPTY = 1 << 20
"""Grid exponent of a tensor of zeros: zero lies on every grid. Larger than any exponent a float has."""


def grid_exponent(tensor: Tensor) -> int:
    """The largest e such that every entry is an integer times 2**e; EMPTY for zeros.

    Raises NotExact if an entry is not finite, since no grid holds it.
    """
    entries = tensor.detach().to(torch.float64).numpy().ravel()
    whole = _whole(entries)
    if whole is not None:
        every = int(np.bitwise_or.reduce(whole)) if entries.size else 0
        return (every & -every).bit_length() - 1 - _FRACTION if every else EMPTY
    entries = entries[entries != 0]
    if entries.size == 0:
        return EMPTY
    if not np.isfinite(entries).all():
        raise NotExact(f"got {entries[~np.isfinite(entries)][0]} among the values; wanted finite numbers")
    mantissas, exponents = np.frexp(entries)
    integers = np.abs(np.ldexp(mantissas, 53)).astype(np.int64)
    lowest = np.frexp((integers & -integers).astype(np.float64))[1] - 1
    return int((lowest + exponents).min()) - 53


def _whole(entries: NDArray[np.float64]) -> NDArray[np.int64] | None:
    """The entries as integers, times 2**30, if they are such and not too large; nearly all that occur are."""
    with np.errstate(over="ignore"):  # what overflows, such as the mask of an attention, is too large
        scaled = entries * 2.0**_FRACTION
    if not (np.abs(scaled) < 2.0**62).all():  # NaN neither
        return None
    whole = scaled.astype(np.int64)
    return whole if (whole == scaled).all() else None


def bits(bound: float, exponent: int) -> int:
    """Bits that the integer bound / 2**exponent takes: the least b with bound / 2**exponent < 2**b; 0 for no bound."""
    if bound == 0 or exponent >= EMPTY // 2:
        return 0
    return math.frexp(bound)[1] - exponent if math.isfinite(bound) else EMPTY


def significand_bits(tensor: Tensor) -> int:
    """Most bits that any one entry takes, wherever its grid lies: a float of so many holds each; 0 for zeros."""
    mantissas, _ = np.frexp(tensor.detach().to(torch.float64).numpy().ravel())
    integers = np.abs(np.ldexp(mantissas[mantissas != 0], 53)).astype(np.int64)
    if integers.size == 0:
        return 0
    lowest = np.frexp((integers & -integers).astype(np.float64))[1] - 1
    return 53 - int(lowest.min())


def premultiplies_exactly(size: int, precision: int) -> bool:
    """Whether fl(x * fl(1/size)) is x/size for every x of ``precision`` (24 or 53) bits that is a multiple of size.

    fl(1/size) * size = 1 + d, so x = k * size becomes fl(k + k*d), and that is k if |d| <= 2**-(precision + 1): then
    |k*d| is below half a step of the grid at k, or a tie at a power of two, which rounds to even.
    """
    one = np.float32(1) if precision == 24 else np.float64(1)
    return abs(Fraction(float(one / type(one)(size))) * size - 1) <= Fraction(1, 1 << (precision + 1))


def exact_square_sum(tensors: Iterable[Tensor]) -> Fraction:
    """Sum of squares of all entries, exactly."""
    total = Fraction(0)
    for tensor in tensors:
        exponent = grid_exponent(tensor)
        if exponent < EMPTY:
            integers = [int(value) for value in np.ldexp(tensor.double().numpy().ravel(), -exponent).tolist()]
            total += sum(value * value for value in integers) * Fraction(2) ** (2 * exponent)
    return total
