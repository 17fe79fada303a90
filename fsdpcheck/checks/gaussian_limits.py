"""Limits that independent Gaussians keep to: each is left with probability ``alarm`` at most, exactly or by a theorem.

Proven for real numbers; draws in floating point are off by a rounding each, which is far below what is told apart.
Legend: n draws, z standardised (divided by the standard deviation that was asked for), Phi the distribution of N(0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

_HALVINGS = 200
"""Bisections of an interval: more than a float64 has bits, so that what is left is a rounding wide."""


def scale_limits(n: int, alarm: float) -> tuple[float, float]:
    """Of sqrt(sum z^2 / n). P(sum z^2 >= n r) for r > 1, and <= n r for r < 1, is exp(-n (r - 1 - ln r) / 2) at most.

    Source: the Chernoff bound of chi-square; Dasgupta, Gupta 2003, doi:10.1002/rsa.10073, lemma 2.2.
    """
    t = 2 * math.log(2 / alarm) / n

    def far(r: float) -> bool:
        return r - 1 - math.log(r) >= t

    low = _edge(lambda x: not far(x), math.exp(-1 - t) / 2, 1.0)[0]
    high = _edge(far, 1.0, 2 + 2 * t + math.sqrt(8 * t))[1]
    return math.sqrt(low), math.sqrt(high)


def correlation_limit(n: int, alarm: float) -> float:
    """Of |<x, y>| / (|x| |y|), x [n] and y [n] independent, one Gaussian of whatever scale; from 1 on it says nothing.

    The cap of those points of the sphere in n dimensions that have <x, y> >= e has measure exp(-n e^2 / 2) at most.
    Source: Ball 1997, An Elementary Introduction to Modern Convex Geometry, lemma 2.2.
    """
    return math.sqrt(2 * math.log(2 / alarm) / n)


def distance_limit(n: int, alarm: float) -> float:
    """Of ``distance``: P(> e) <= 2 exp(-2 n e^2). Source: Massart 1990, doi:10.1214/aop/1176990746."""
    return math.sqrt(math.log(2 / alarm) / (2 * n))


def largest_limits(n: int, alarm: float) -> tuple[float, float]:
    """Of max |z|: P(< l) = (1 - 2 Phi(-l))^n and P(> u) <= 2 n Phi(-u), each alarm / 2."""
    phi = NormalDist()
    outside = -math.expm1(math.log(alarm / 2) / n)
    return -phi.inv_cdf(outside / 2), -phi.inv_cdf(alarm / (4 * n))


def distance(z: Tensor) -> float:
    """Kolmogorov's: the most that the empirical distribution of z [n] is away from Phi."""
    told = torch.special.ndtr(z.double().sort().values)
    steps = torch.arange(len(z) + 1, dtype=torch.float64) / len(z)
    return float(torch.maximum((steps[1:] - told).max(), (told - steps[:-1]).max()))


def correlation(x: Tensor, y: Tensor) -> float:
    """<x, y> / (|x| |y|) of x [n] and y [n]; 0 where one of them is zero."""
    lengths = float(x.norm()) * float(y.norm())
    return float(x @ y) / lengths if lengths else 0.0


def _edge(right: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """The place between ``low`` and ``high``, from where on ``right`` holds, from both sides."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if right(middle) else (middle, high)
    return low, high
