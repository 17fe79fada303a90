"""Values of a case: a frozen, counter-based generator of integers.

Value k of a stream is a function of (seed, name of the stream, k) alone, so every machine, torch and numpy release
gives the same values and a replay token never rots. The functions are frozen by golden vectors in
tests/case/test_prng.py: changing them means a new ``case.VERSION``. The mixer is splitmix64 (Steele, Lea, Flood 2014);
names are hashed by FNV-1a.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SALT = 4447
"""Chosen so that the smallest cases (seed 0), where shrinking ends, have non-zero gradients."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def integers(seed: int, stream: str, shape: tuple[int, ...], low: int, high: int) -> NDArray[np.int64]:
    """Integers in [low, high], both ends included, row-major over ``shape``.

    A longer stream begins with the shorter one. Uniform up to (high - low + 1) / 2**32; the span must be below 2**32.
    """
    span = high - low + 1
    if not 0 < span < 1 << 32:
        raise ValueError(f"got the range [{low}, {high}]; wanted low <= high and fewer than 2**32 values")
    scaled = ((_bits(seed, stream, math.prod(shape)) >> np.uint64(32)) * np.uint64(span)) >> np.uint64(32)
    return scaled.astype(np.int64).reshape(shape) + low


def symmetric(seed: int, stream: str, shape: tuple[int, ...], bound: int) -> NDArray[np.int64]:
    """Integers in [-bound, bound], 0 half as likely as each other value: zeros annihilate gradients and hide errors."""
    doubled = integers(seed, stream, shape, -2 * bound, 2 * bound)
    halved: NDArray[np.int64] = np.sign(doubled) * ((np.abs(doubled) + 1) // 2)
    return halved


def fractions(seed: int, stream: str, shape: tuple[int, ...], bits: int) -> NDArray[np.float64]:
    """Multiples of 2**-bits in [-1, 1], both ends included; bits <= 30. Exact in float64."""
    return np.ldexp(integers(seed, stream, shape, -(1 << bits), 1 << bits).astype(np.float64), -bits)


def permutation(seed: int, stream: str, n: int) -> tuple[int, ...]:
    """A permutation of 0 .. n-1: the order that sorts n hashed values."""
    return tuple(int(index) for index in np.argsort(_bits(seed, stream, n), kind="stable"))


def _bits(seed: int, stream: str, count: int) -> NDArray[np.uint64]:
    """The first ``count`` 64-bit values of a stream, [count]."""
    start = _mix(_mix((seed + _SALT) & _MASK) ^ _name_hash(stream))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
    counters = (counters ^ (counters >> np.uint64(30))) * np.uint64(_FIRST)
    counters = (counters ^ (counters >> np.uint64(27))) * np.uint64(_SECOND)
    return counters ^ (counters >> np.uint64(31))


def _mix(value: int) -> int:
    """One splitmix64 step on a Python integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _name_hash(stream: str) -> int:
    """64-bit FNV-1a of the name's UTF-8 bytes."""
    value = 0xCBF29CE484222325
    for byte in stream.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value
