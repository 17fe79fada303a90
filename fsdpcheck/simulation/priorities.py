"""Orders that are drawn: probabilistic concurrency testing, with its bound (Burckhardt et al., ASPLOS 2010).

Whoever could go next has a priority, drawn at random, and the highest goes; at d - 1 of the k choices, drawn uniformly,
the one that would go is put behind all others. A bug that shows whenever d events come in a certain order, its depth,
is then found by one drawn order with a probability of at least 1 / (n k^(d - 1)), n being how many could ever go next.
Where only one could go there is nothing to choose, and k does not count it: to be put back there changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from fsdpcheck.simulation.decisions import Option, Step

DEPTH: Final = 2
"""Most bugs of order that were studied show with two events in a certain order (Burckhardt et al., table 1)."""


@dataclass(frozen=True)
class Drawn:
    """How orders were drawn: ``orders`` of them, for bugs of this ``depth``.

    ``takers``: how many took turns in any order that was run; ``choices``: how often there was a choice in one, at
    most. ``counted``: how many were drawn in the knowledge that there are so many choices; the bound is of these.
    """

    orders: int
    depth: int
    takers: int
    choices: int
    counted: int

    @property
    def chance(self) -> Fraction:
        """What one drawn order finds a bug of this depth with, at least, if no order has more of both."""
        return Fraction(1, max(self.takers, 1) * max(self.choices, 1) ** (self.depth - 1))

    def __str__(self) -> str:
        powers = "" if self.depth == 1 else f" * {self.choices}" + (f"^{self.depth - 1}" if self.depth > 2 else "")
        who = "each" if self.counted == self.orders else f"each of the last {self.counted}"
        return (
            f"{self.orders} of these orders; {who} finds a bug of order of depth {self.depth} with probability "
            f"1/({self.takers}{powers}) or more, if no order has more than {self.choices} choices among {self.takers}"
        )


class Priorities:
    """Chooses among options by priorities that change at drawn choices. ``choices``: how many there may be (k)."""

    def __init__(self, draw: random.Random, choices: int, depth: int = DEPTH) -> None:
        self._draw, self._of = draw, dict[str, float]()
        self._changes = {draw.randrange(choices): place for place in range(1, depth)} if choices else {}
        self._made = 0

    def choose(self, options: Sequence[Option]) -> Option:
        """The option of the one with the highest priority."""
        for option in options:
            self._of.setdefault(option.taker, self._draw.random())
        first = self._highest(options)
        if len(options) == 1:
            return first
        if (place := self._changes.get(self._made)) is not None:
            self._of[first.taker] = -float(place)  # below all that were drawn, and each change below those before it
        self._made += 1
        return self._highest(options)

    def _highest(self, options: Sequence[Option]) -> Option:
        return max(options, key=lambda option: self._of[option.taker])


def takers(steps: Iterable[Step]) -> set[str]:
    """Who could have gone next at any of these steps."""
    return {option.taker for step in steps for option in step.options.values()}


def choices(steps: Iterable[Step]) -> int:
    """At how many of these steps there was a choice."""
    return sum(len(step.options) > 1 for step in steps)
