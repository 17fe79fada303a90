"""Lagrange's theorem and the slack it gives: instrument targets that set a sample's gradient norm to a chosen value.

A sample whose squared gradient norm is N (an integer) gets the four instrument targets u with |u|^2 = T - N, so that
its squared norm becomes T. Every integer T >= N can be reached: a power of four (the clip factor is then dyadic), the
threshold itself, one unit below it. All integers are Python's; nothing rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Quadruple = tuple[int, int, int, int]


def four_squares(n: int) -> Quadruple:
    """Integers (a, b, c, d) with a^2 + b^2 + c^2 + d^2 == n, the same for the same n.

    n >= 0, ValueError otherwise. Powers of four are divided out. Then greedy from above: the first a whose remainder
    is a sum of three squares (Legendre: not 4^i (8 j + 7)), then the first b whose remainder is a sum of two. What is
    left after a is a few times sqrt(n), so the search for b, c and d is short: about 30 us for n near 2^52.
    """
    if n < 0:
        raise ValueError(f"got n = {n}; wanted n >= 0")
    root, scale = _without_fours(n)
    for a in range(math.isqrt(root), -1, -1):
        rest = root - a * a
        if _without_fours(rest)[0] % 8 != 7:
            b, c, d = _three_squares(rest)
            return (a * scale, b * scale, c * scale, d * scale)
    raise AssertionError("unreachable: every n >= 0 is a sum of four squares (Lagrange 1770)")


def _without_fours(n: int) -> tuple[int, int]:
    """(m, 2**i) with n == m * 4**i and 4 not dividing m; (0, 1) for 0.

    Where 8 divides a sum of three or four squares all of them are even, so a search that does not divide first must go
    down to a multiple of 2**i.
    """
    scale = 1
    while n and n % 4 == 0:
        n //= 4
        scale *= 2
    return n, scale


def _three_squares(n: int) -> tuple[int, int, int]:
    """(b, c, d) whose squares add up to n, which passes Legendre's test (1798)."""
    root, scale = _without_fours(n)
    for b in range(math.isqrt(root), -1, -1):
        pair = _two_squares(root - b * b)
        if pair is not None:
            return (b * scale, pair[0] * scale, pair[1] * scale)
    raise AssertionError(f"unreachable: {n} passed Legendre's test")


def _two_squares(n: int) -> tuple[int, int] | None:
    """(c, d) with c^2 + d^2 == n and c >= d >= 0, or None."""
    c = math.isqrt(n)
    while 2 * c * c >= n:
        rest = n - c * c
        d = math.isqrt(rest)
        if d * d == rest:
            return (c, d)
        c -= 1
    return None


def slack_targets(squared: Sequence[int], threshold: int, unit: int, choices: Sequence[int]) -> list[int | None]:
    """Target T_i >= squared[i] for each sample, in units in which the squared norms are integers; None: no slack.

    ``unit`` is 1 in those units, a power of four (gradients on a grid 2**-q have integer norms in units of 4**-q), and
    ``threshold`` is C^2. ``choices[i]`` (any integers >= 0) picks for sample i one of: clip (the least power of four
    above C^2 and not below N_i), and, where N_i allows, exactly at the threshold, just below it (C^2 - 1), no slack.
    At least one sample is clipped if there is any.
    """
    targets = [_target(n, threshold, unit, choice) for n, choice in zip(squared, choices, strict=True)]
    if targets and not any(t is not None and t > threshold for t in targets):
        forced = choices[0] % len(targets)
        targets[forced] = _clipped(squared[forced], threshold, unit)
    return targets


def _target(n: int, threshold: int, unit: int, choice: int) -> int | None:
    options: list[int | None] = [_clipped(n, threshold, unit)]
    options += [threshold] if n <= threshold else []
    options += [threshold - unit] if n <= threshold - unit else []
    options += [None] if n <= threshold else []
    return options[choice % len(options)]


def _clipped(n: int, threshold: int, unit: int) -> int:
    target = unit
    while target < max(n, threshold + unit):
        target *= 4
    return target
