"""Binomial tails against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from fsdpcheck.exact import binomial
from tests.common.tables import each


def tail(k: int, n: int, q: Fraction) -> Fraction:
    """P(X >= k), exactly."""
    return sum((math.comb(n, j) * q**j * (1 - q) ** (n - j) for j in range(max(k, 0), n + 1)), Fraction(0))


@each("q", [Fraction(1, 8), Fraction(1, 2), Fraction(3, 4), Fraction(1)], ids=str)
@each("n", [1, 2, 40, 300])
def test_tails_are_those_of_exact_arithmetic(n: int, q: Fraction) -> None:
    for k in range(0, n + 1, max(1, n // 20)):
        above, below = tail(k, n, q), 1 - tail(k + 1, n, q)
        if k > n * q:
            assert binomial.at_least(k, n, float(q)) == pytest.approx(float(above), rel=1e-9)
        if k < n * q:
            assert binomial.at_most(k, n, float(q)) == pytest.approx(float(below), rel=1e-9)
        assert binomial.above(k, n, float(q)) == pytest.approx(float(above), rel=1e-9, abs=1e-12)
        far = min(1.0, 2 * float(min(above, below)))
        assert binomial.as_far_out(k, n, float(q)) == pytest.approx(far, rel=1e-9) or far > 0.9


def test_a_certain_event_that_fails_is_infinitely_far_out() -> None:
    assert binomial.as_far_out(4, 4, 1.0) == 1.0
    assert binomial.as_far_out(3, 4, 1.0) == 0.0


def test_a_large_count_keeps_its_digits() -> None:
    k, n = 2048 + 192, 4096
    assert binomial.at_least(k, n, 0.5) == pytest.approx(float(tail(k, n, Fraction(1, 2))), rel=1e-9)
