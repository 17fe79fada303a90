"""Law: a sentence that must hold of every implementation that promises it, and how to draw cases for it.

A law is written once, as a function of (case, run); ``@law`` makes it a pytest test and an entry of the registry that
the command line reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdpcheck import strategies
from fsdpcheck.adapters.contract import Features, Observable, Promise, Trait
from fsdpcheck.judging import coverage
from fsdpcheck.loading import references

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.case import Case
    from fsdpcheck.judging.run import Run

    Body = Callable[[Any, Run], None]
    """The case is of the type that the law's space draws."""


@dataclass(frozen=True)
class Law:
    """One law.

    ``body(case, run)`` returns or raises Violation. ``space``: the cases that it is about, and what must occur among
    them. ``needs_traits``: what every case of this law demands. ``needs_promises``: what must be promised beside
    ``promise``. ``statement``: the law in words (the docstring): a guarantee in one line, then, of a law of this
    project, lines "Not seen: ..." and "Source: ...". ``where``: file:line of the body. ``any_numbers``: whether it is
    asked with real numbers and without. ``takes``: the fewest ranks that an implementation has to take, whatever
    numbers are asked for. ``climbs``: whether its body says how near a case comes to a bound (``Ran.reach``), and cases
    are sought that come nearer (judging/climbing.py). ``on_real_ranks``: whether it is asked on real ranks alone, with
    which it compares the simulated ones.
    """

    name: str
    promise: Promise
    observe: frozenset[Observable]
    space: strategies.Space
    needs_traits: frozenset[Trait]
    body: Body
    statement: str
    where: str
    needs_promises: frozenset[Promise] = frozenset()
    any_numbers: bool = False
    takes: int = 1
    climbs: bool = False
    on_real_ranks: bool = False

    def draw(self, features: Features, world_sizes: Sequence[int]) -> SearchStrategy[Case]:
        """The cases of the law that an implementation with these features accepts, on one of these numbers of ranks."""
        return strategies.cases_of(self.space, features, world_sizes)

    @property
    def file(self) -> str:
        """The file of a law of a user's own; "" for one of fsdpcheck's."""
        is_own = self.body.__module__.startswith("fsdpcheck.properties.")
        return "" if is_own else self.where.rpartition(":")[0]

    @property
    def source(self) -> str:
        """What another process imports to have the law: the file or module of a user's own, "" for fsdpcheck's."""
        is_file = self.body.__module__.startswith((references.FILE, "__main__"))
        return self.file if is_file or not self.file else self.body.__module__

    @property
    def guarantee(self) -> str:
        """The first paragraph of the statement, on one line."""
        return " ".join(self.statement.split("\n\n")[0].split())

    def not_promised(self, features: Features) -> str:
        """Why an implementation with these features does not answer for this law; "" when it does."""
        for promise in (self.promise, *sorted(self.needs_promises)):
            if promise not in features.promises:
                return f"no promise {promise!r}: {features.reason(promise) or 'the adapter gives no reason'}"
        if hidden := self.observe - features.observables - {"params"}:
            return f"the adapter does not show {', '.join(sorted(hidden))}"
        if unmet := self.needs_traits - features.accepts:
            return f"the adapter does not accept {', '.join(sorted(unmet))}"
        taken = features.max_world_size
        if taken is not None and taken < self.fewest:
            return f"the law says nothing on fewer than {self.fewest} ranks, the adapter takes {taken}"
        return ""

    @property
    def fewest(self) -> int:
        """The fewest ranks of an implementation of which the law says anything."""
        return max(self.says_on, self.takes)

    @property
    def says_on(self) -> int:
        """The fewest ranks that have to be asked for if the law is to say anything."""
        return max(self.space.ranks, *(coverage.LABELS[label].ranks for label in self.space.vacuous_without), 1)

    def vain_on(self, world_sizes: Iterable[int]) -> str:
        """Why the law says nothing on any of these numbers of ranks; "" where it does on one."""
        sizes, why = tuple(dict.fromkeys(world_sizes)), ""
        if max(sizes) < self.says_on:
            why = f"fewer than {self.says_on}"
        elif not all(any(map(coverage.LABELS[label].can_be_on, sizes)) for label in self.space.vacuous_without):
            why = "a prime number of"
        return f"the law says nothing on {why} ranks, asked were {', '.join(map(str, sizes))}" if why else ""
