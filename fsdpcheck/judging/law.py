"""Law: a sentence that must hold of every implementation that promises it, and how to draw cases for it.

A law is written once, as a function of (case, run); ``@law`` makes it a pytest test and an entry of the registry that
the command line reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdpcheck.adapters.contract import Features, Observable, Promise, Trait
from fsdpcheck.judging import coverage

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.case import Case
    from fsdpcheck.judging.run import Run

    Draw = Callable[[Features, tuple[int, ...]], SearchStrategy[Case]]
    Body = Callable[[Case, Run], None]


@dataclass(frozen=True)
class Law:
    """One law.

    ``body(case, run)`` returns or raises Violation. ``draw(features, world_sizes)`` gives a strategy of cases that an
    implementation with these features accepts, on one of these numbers of ranks. ``needs_traits``: what every case of
    this law demands. ``needs_promises``: what must be promised beside ``promise``. ``statement``: the law in words (the
    docstring): a guarantee in one line, then, of a law of this project, lines "Not seen: ..." and "Source: ...".
    ``where``: file:line of the body. ``ranks``: the fewest on which the law says anything; smaller worlds
    are not drawn. ``own_models``: whether it can be asked of a user's own model, whatever that is made of and however
    small; ``known_layers``: only of one whose parameters are in layers of torch that have a word among the traits.
    ``any_numbers``: whether its cases have real numbers where they are accepted, without asking for them.
    ``takes``: the fewest ranks that an implementation has to take, whatever numbers are asked for.

    ``must_occur``: labels (coverage.LABELS) that its judged cases must have where they can; ``vacuous_without``: ones
    without which its "holds" would say nothing, so that there is none without them, whatever kept them out.
    """

    name: str
    promise: Promise
    observe: frozenset[Observable]
    draw: Draw
    needs_traits: frozenset[Trait]
    body: Body
    statement: str
    where: str
    ranks: int = 1
    own_models: bool = True
    needs_promises: frozenset[Promise] = frozenset()
    known_layers: bool = False
    any_numbers: bool = False
    takes: int = 1
    must_occur: tuple[str, ...] = ()
    vacuous_without: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file of a law of a user's own; "" for one of fsdpcheck's."""
        is_own = self.body.__module__.startswith("fsdpcheck.properties.")
        return "" if is_own else self.where.rpartition(":")[0]

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
        return max(self.ranks, *(coverage.LABELS[label].ranks for label in self.vacuous_without), 1)

    def vain_on(self, world_sizes: Iterable[int]) -> str:
        """Why the law says nothing on any of these numbers of ranks; "" where it does on one."""
        sizes, why = tuple(dict.fromkeys(world_sizes)), ""
        if max(sizes) < self.says_on:
            why = f"fewer than {self.says_on}"
        elif not all(any(map(coverage.LABELS[label].can_be_on, sizes)) for label in self.vacuous_without):
            why = "a prime number of"
        return f"the law says nothing on {why} ranks, asked were {', '.join(map(str, sizes))}" if why else ""
