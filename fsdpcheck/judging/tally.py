"""Tally: how many cases of one law were judged, rejected or refused, and of what kinds they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from fsdpcheck.case import Case
from fsdpcheck.errors import NotApplicable, NotExact, NotOnRanks
from fsdpcheck.judging import coverage

HOPELESS: Final = 40
"""Cases rejected or refused in vain before drawing ends, where it is not for any case: each may take a build or a run.

So with a user's own model of which none was judged, and in the search for cases with a label that has not occurred.
"""

UNLIKELY: Final = 10
"""The same where such a case is sought and not demanded."""


@dataclass
class Tally:
    """What became of the cases of one law on one implementation."""

    limits: coverage.Limits
    wanted: int = 0
    """How many draws have to be judged at least."""
    labels: tuple[str, ...] = ()
    """What must occur among judged cases."""
    sought: tuple[str, ...] = ()
    """What should occur among them, and is not demanded."""
    exhausted: bool = False
    """Whether there are no more cases than were drawn."""
    passed: int = 0
    """How many draws were judged, equal ones too."""
    judged: set[Case] = field(default_factory=set)
    rejected: set[Case] = field(default_factory=set)
    unfit: set[Case] = field(default_factory=set)
    """Those of the rejected of which the law says nothing on this implementation."""
    elsewhere: set[Case] = field(default_factory=set)
    """Those of them of which it says something on other numbers of ranks."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why cases were rejected."""
    refused: dict[Case, str] = field(default_factory=dict)
    """Cases that the implementation says it cannot take, and how it says so."""
    census: Counter[str] = field(default_factory=Counter)
    """How many judged cases have a label."""
    left: dict[str, None] = field(default_factory=dict)
    """What was left changed of the process by any run, a sentence each."""
    hits: Counter[str] = field(default_factory=Counter)
    """How often the code of each install ran."""
    reached: dict[str, Fraction] = field(default_factory=dict)
    """How near any judged case came to a bound of the law's, by the kind of case; 1 is the bound."""

    def reject(self, case: Case, error: NotExact) -> None:
        self.rejected.add(case)
        self.unfit |= {case} if isinstance(error, NotApplicable) else set()
        self.elsewhere |= {case} if isinstance(error, NotOnRanks) else set()
        self.reasons[str(error)] += 1

    def count(self, case: Case, labels: Iterable[str], hits: Mapping[str, int]) -> None:
        """A case was judged. ``labels`` of a case that was judged before are not asked for."""
        self.hits.update(hits)
        if case not in self.judged:
            self.judged.add(case)
            self.census.update(labels)

    def reach(self, reached: Mapping[str, Fraction]) -> None:
        """What one case came to."""
        for kind, share in reached.items():
            self.reached[kind] = max(share, self.reached.get(kind, share))

    @property
    def hopeless(self) -> bool:
        """Whether a user's own model gave no case that could be judged, of as many as say that it never will."""
        return self.limits.own and not self.judged and len(self.rejected) + len(self.refused) >= HOPELESS

    @property
    def enough(self) -> bool:
        """Whether the least number of cases was judged, or all there are."""
        return self.outcome(False).enough

    @property
    def unreached(self) -> tuple[str, ...]:
        """Labels that must occur, or are sought, and that no judged case has so far."""
        return coverage.missing((*self.labels, *self.sought), self.census)

    def outcome(self, spent: bool) -> coverage.Judged:
        """What came of the drawing, as data. ``spent``: whether the budget ended it."""
        return coverage.Judged(
            self.wanted,
            self.passed,
            self.census,
            len(self.rejected - self.unfit),
            len(self.unfit),
            "".join(text for text, _ in self.reasons.most_common(1)),
            self.exhausted,
            spent,
            len(self.elsewhere),
        )
