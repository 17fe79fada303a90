"""Draws of noise that are used twice, seen through the rounding of the gradients they were added to.

Legend: g a gradient without noise, y with it, z the noise, d = y - g as computed, u half the distance from 1 to the
next number, s the standard deviation of z, n draws, r the most that rounding puts between d and z.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def used_twice(drawn: Tensor, clean: Tensor, deviation: float, unit: float, alarm: Fraction) -> tuple[int, int] | None:
    """The first two places, ascending, that have one draw; None if there are none, or too few to exclude chance.

    ``drawn`` d [n] and ``clean`` g [n] in float64, ``unit`` u. A draw that is negated is the same one: two places have
    one draw only if their intervals |d| - r .. |d| + r meet. Independent Gaussians of standard ``deviation`` are called
    so with probability ``alarm`` at most.
    """
    rooms, meetings = rooms_of(drawn, clean, deviation, unit, alarm)
    found = _together(drawn.abs() - rooms, drawn.abs() + rooms)
    return min(found, key=lambda pair: pair[1]) if found and len(found) >= needed(meetings, alarm) else None


def rooms_of(drawn: Tensor, clean: Tensor, deviation: float, unit: float, alarm: Fraction) -> tuple[Tensor, float]:
    """(r [n], the most pairs of honest draws whose intervals meet on the average).

    Noise is added to g, or to the sum that g is the quotient of: y has two roundings at most, g one, d one, so that
    |d - z| <= 2u|y| + u|g| + u|d| + O(u^2) < 4u (|g| + |d|). No |z| of n exceeds t = s sqrt(2 ln(2n / alarm)) but with
    probability alarm / 2, so with at least t in place of |d| r depends on no draw. Two intervals meet only if the draws
    are within 2 (r + r') of one another, or their sum is within that of 0; the density of difference and of sum is
    1 / (2 s sqrt(pi)) at most.
    """
    n = len(drawn)
    largest = deviation * math.sqrt(2 * math.log(2 * n / alarm))
    told = 4 * unit * (clean.abs() + largest)
    rooms = torch.maximum(told, room(drawn, clean, unit))
    return rooms, 4 * (n - 1) * float(told.sum()) / (deviation * math.sqrt(math.pi))


def room(drawn: Tensor, clean: Tensor, unit: float) -> Tensor:
    """How far d may be from z, [n], as in ``rooms_of``."""
    return 4 * unit * (clean.abs() + drawn.abs())


def needed(meetings: float, alarm: Fraction) -> int:
    """How many disjoint pairs have to meet, so that chance makes as many with probability alarm / 2 at most.

    Disjoint pairs are independent: k of them meet with probability meetings^k / k! at most, by Markov's inequality.
    """
    count, chance = 1, meetings
    while chance > alarm / 2:
        count += 1
        chance *= meetings / count
    return count


def _together(low: Tensor, high: Tensor) -> list[tuple[int, int]]:
    """Of each set of several intervals that hang together, the two that come first."""
    order = low.argsort(stable=True)
    reach = high[order].cummax(0).values
    apart = torch.cat([torch.tensor([True]), low[order][1:] > reach[:-1]])
    groups: dict[int, list[int]] = {}
    for place, number in zip(order.tolist(), apart.cumsum(0).tolist(), strict=True):
        groups.setdefault(number, []).append(place)
    several = (sorted(group)[:2] for group in groups.values() if len(group) > 1)
    return [(first, second) for first, second in several]
