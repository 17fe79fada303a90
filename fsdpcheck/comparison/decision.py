"""Whether a difference between W ranks and one is rounding: decided by observable, never by a tolerance.

Both are run in float64 in place of the script's own precision, and both with noise. The threshold of an observable is
the largest distance of a noisy run from the run without, times a factor that follows from how many runs there were and
how seldom an honest script may be accused (rounding_bound.py). What is within it agrees, as finely as the threshold is
small; where that is coarser than what float32 tells apart, nothing is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from fsdpcheck.comparison.distances import Distance, between
from fsdpcheck.comparison.record import Key, order
from fsdpcheck.comparison.rounding_bound import factor

COARSEST: Final = torch.finfo(torch.float32).eps
"""The coarsest resolution, relative to the observable, at which it is decided: a float32 tells no more apart."""
Says = Literal["agrees", "differs", "undecidable"]
Values = Mapping[Key, Tensor]


@dataclass(frozen=True)
class Decision:
    """Of one observable. ``apart`` and ``threshold`` are absolute, ``size`` is its largest entry.

    ``noise``: the largest distance of a noisy run. ``most``: for one that is zero but for rounding, the largest entry
    of its kind at its step, by which it is decided.
    """

    key: Key
    says: Says
    apart: float
    threshold: float
    size: float
    noise: float
    why: str = ""
    most: float = 0.0

    @property
    def resolution(self) -> float:
        """The smallest difference that would be seen, relative to the largest entry."""
        by = self.most or self.size
        return self.threshold / by if by else 0.0


@dataclass(frozen=True)
class Noise:
    """Distances of noisy runs from the run without, the largest by observable. ``runs``: how many of each world."""

    largest: Mapping[Key, float]
    runs: int


def noise_of(*worlds: tuple[Values, Sequence[Values]]) -> Noise:
    """Of worlds, each the run without noise and those with it."""
    largest: dict[Key, float] = {}
    for clean, noisy in worlds:
        for run in noisy:
            for key, distance in between(clean, run).items():
                largest[key] = max(largest.get(key, 0.0), distance.apart)
    return Noise(largest, min(len(noisy) for _, noisy in worlds))


def decided(
    base: Values,
    run: Values,
    noise: Noise,
    eps: float,
    false_alarm: float,
    judged: Callable[[Key], bool],
    exact: Collection[Key] = (),
) -> list[Decision]:
    """Every observable that is judged, in the order in which the script makes them.

    ``eps``: of the precision in which both were run; an observable is rounded once at least. ``false_alarm``: the
    probability that any of them is said to differ in an honest script. ``exact``: of which every bit counts.
    """
    distances = {key: distance for key, distance in between(base, run).items() if judged(key)}
    most = _largest_by_kind(distances)
    keys = sorted(distances, key=order)
    return [
        _exactly(key, distances[key])
        if key in exact
        else _of(key, distances[key], noise, eps, false_alarm, len(keys), most[key.step, key.kind])
        for key in keys
    ]


def _exactly(key: Key, distance: Distance) -> Decision:
    says: Says = "differs" if distance.apart else "agrees"
    return Decision(key, says, distance.apart, 0.0, distance.size, 0.0, "exact")


def _of(
    key: Key, distance: Distance, noise: Noise, eps: float, false_alarm: float, observables: int, most: float
) -> Decision:
    shaken = max(noise.largest.get(key, 0.0), eps * distance.size)
    threshold = shaken * factor(noise.runs, distance.entries, observables, false_alarm)
    found = Decision(key, "agrees", distance.apart, threshold, distance.size, shaken)
    if distance.apart == 0:
        return replace(found, why="equal bits")
    if math.isinf(distance.apart):
        return replace(found, says="differs")
    if distance.apart > threshold:
        return replace(found, says="differs")
    if threshold <= COARSEST * distance.size:
        return found
    if distance.size <= threshold <= COARSEST * most:
        return replace(found, why="zero but for rounding", most=most)
    return replace(found, says="undecidable", why="noise moves it as much as a difference would")


def _largest_by_kind(distances: Mapping[Key, Distance]) -> dict[tuple[int, str], float]:
    """The largest entry of all observables of one kind at one step."""
    most: dict[tuple[int, str], float] = {}
    for key, distance in distances.items():
        place = key.step, key.kind
        most[place] = max(most.get(place, 0.0), distance.size)
    return most
