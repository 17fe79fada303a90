"""What came of comparing a script on several numbers of ranks, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fsdpcheck.comparison.causes import Cause
from fsdpcheck.comparison.command_line import CommandLine
from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.facts import Fact
from fsdpcheck.comparison.rounding_bound import FALSE_ALARM
from fsdpcheck.execution import Failure

Says = Literal["agrees", "differs", "fails", "undecidable"]


@dataclass(frozen=True)
class World:
    """What came of one number of ranks against the base.

    ``fact``: the first that differs. ``first``: the first observable that differs. ``undecidable``: observables of
    which nothing can be said. ``precision``: the first that agrees in float64 and not in the script's own precision.
    ``observables``: how many were judged; ``equal`` of them have equal bits, ``differing``
    differ. ``alike``: names of those of the kind and step of ``first`` that differ, of ``of_alike``. ``resolution``:
    the coarsest of what agrees. ``line``, ``call``: where ``first`` or ``fact`` was seen, and the collective before it.
    ``exact``: how many are proved exact, so that every bit counts; ``ended``: at which operator that ended.
    ``warning``: what was compared in place of what the script does, a sentence.
    """

    size: int
    says: Says
    failure: Failure | None = None
    fact: Fact | None = None
    first: Decision | None = None
    undecidable: tuple[Decision, ...] = ()
    precision: Decision | None = None
    causes: tuple[Cause, ...] = ()
    observables: int = 0
    equal: int = 0
    differing: int = 0
    alike: tuple[str, ...] = ()
    of_alike: int = 0
    resolution: float = 0.0
    line: str = ""
    call: str = ""
    exact: int = 0
    ended: str = ""
    warning: str = ""

    def beside(self, base: int) -> World:
        """The same with sentences, which are of one rank, about a base of so many."""
        if base == 1:
            return self
        causes = tuple(cause._replace(text=cause.text.replace("one rank", "the base")) for cause in self.causes)
        fact = self.fact and replace(self.fact, text=self.fact.text.replace("one rank", "the base"))
        return replace(self, causes=causes, fact=fact)


@dataclass(frozen=True)
class Comparison:
    """A script on several numbers of ranks.

    ``why``: why nothing could be compared; "" where it was. ``notes``: what is reported and not judged, and how often.
    """

    line: CommandLine
    base: int
    worlds: tuple[World, ...]
    why: str = ""
    failure: Failure | None = None
    notes: tuple[tuple[str, int], ...] = ()
    steps: int = 0
    false_alarm: float = FALSE_ALARM
    runs: int = 0

    @property
    def says(self) -> Says:
        """The worst of what its worlds say; undecidable where nothing was compared."""
        said = {world.says for world in self.worlds}
        ranked: tuple[Says, ...] = ("fails", "differs", "undecidable", "agrees")
        return next((each for each in ranked if each in said), "undecidable")
