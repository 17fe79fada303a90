"""Verdict and Finding: what became of one law on one adapter, as plain data that goes through JSON unchanged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdpcheck.errors import FINDING, HOLDS, INTERNAL, NO_PROGRESS, USAGE
from fsdpcheck.errors.excerpt import WHOLE, excerpt
from fsdpcheck.findings.ranks import RankStood
from fsdpcheck.findings.violation import Violation

Status = Literal["holds", "finding", "not promised", "not asked", "no case", "too few cases", "not supported", "error"]
Confirmation = Literal["yes", "no", "not tried"]

INEXACT = "as not exact"
"""Stands in the reason of a law without a case where cases were drawn and are outside the exact domain."""
NOT_CHECKED = "not checked"
"""How the reason begins of a law that was left out because of what another one met."""

_QUOTING = ("place", "what", "got", "wanted", "where", "cause", "note", "when", "stage", "lines")
"""Fields of a finding; the others are fsdpcheck's own, and of bounded length."""

_WORST_FIRST = (INTERNAL, USAGE, FINDING, NO_PROGRESS)


@dataclass(frozen=True)
class Finding:
    """One broken law, with the smallest case that breaks it.

    ``what, got, wanted, where, cause`` are those of the Violation. ``kind`` is the Execution's failure kind,
    "value" when all ranks finished with a wrong number, "undetermined" when the same case gives other results.
    ``place`` is file:line of the innermost frame outside torch, when a failure has one, or where the first wrong value
    was seen. ``case`` is the case as JSON, ``words`` the same for people. ``confirmed``: did real ranks break the
    same law on the same case; ``note`` says why not, or what else must be known.
    ``when``: which single changes of the case make the law hold, and which kind of case alone breaks it; a line each.
    ``stage``: what of a step differs first, and between which lines. Both may be empty. ``quantity``: what differs
    first, in two words. ``lines``: those that all failing cases run, and none that one change makes hold.
    ``holds_with``, ``breaks_with``: single changes of the case by what comes of them.
    ``alike``: how many further cases of the law fail like this one. ``ranks``: how each stood in the run that broke the
    law, and its last calls.
    """

    law: str
    guarantee: str
    adapter: str
    engine: str
    kind: str
    place: str
    what: str
    got: str
    wanted: str
    where: str
    cause: str
    case: Mapping[str, Any]
    words: str
    token: str
    confirmed: Confirmation = "not tried"
    confirmed_on: tuple[str, ...] = ()
    """The real ranks that broke the law on the same case: "gloo x4", "nccl x2"."""
    note: str = ""
    when: str = ""
    stage: str = ""
    laws: str = ""
    """The file of the law, if it is a user's own."""
    quantity: str = ""
    holds_with: tuple[str, ...] = ()
    breaks_with: tuple[str, ...] = ()
    alike: int = 0
    lines: str = ""
    ranks: tuple[RankStood, ...] = ()

    def bounded(self) -> Finding:
        """The finding with excerpts of its texts: they may quote what an implementation says (errors/excerpt.py)."""
        quoted: dict[str, Any] = {name: excerpt(getattr(self, name), WHOLE) for name in _QUOTING}
        return dataclasses.replace(self, **quoted, ranks=tuple(rank.bounded() for rank in self.ranks))

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Finding:
        several = {name: tuple(data.get(name, ())) for name in ("holds_with", "breaks_with", "confirmed_on")}
        return Finding(**{**data, **several, "ranks": tuple(map(RankStood.from_data, data.get("ranks", ())))})


@dataclass(frozen=True)
class Verdict:
    """What became of one law on one adapter.

    ``cases`` distinct cases were judged, ``rejected`` distinct cases were outside the exact domain. ``reason``: why a
    law is not promised, ran no case, stopped with an error, is not supported (the adapter refuses a user's model), or
    is not asked: no error and no pass, on ranks whose number is given (torchrun's) and which the law needs otherwise.
    ``exit_code`` is what this verdict alone asks for. ``census`` counts the judged cases by what they demand;
    ``undrawn``: traits that the adapter accepts and that none of them demanded, so that nothing is said of them;
    ``never``: so of kinds of cases that the law names and that none of them was, in words (see judging/coverage.py).
    ``left``: what ranks, or importing the adapter, left changed of the process, a sentence each; it was put back.
    ``behind``: findings of other roots, among the cases that do not fail like ``finding``.
    ``reached``: how near the judged cases came to a bound of the law's, a sentence for each kind of case.
    """

    law: str
    adapter: str
    status: Status
    cases: int = 0
    rejected: int = 0
    seconds: float = 0.0
    reason: str = ""
    census: Mapping[str, int] = field(default_factory=dict)
    undrawn: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    finding: Finding | None = None
    exit_code: int = HOLDS
    left: tuple[str, ...] = ()
    behind: tuple[Finding, ...] = ()
    reached: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, in the order in which they were met."""
        return () if self.finding is None else (self.finding, *self.behind)

    @property
    def root(self) -> tuple[str, ...]:
        """Errors with one root are one error, met by several laws: what was got, without the case and what is next."""
        told = self.reason.split("\nin case ")[0].splitlines()
        if told and told[0].startswith("Traceback"):
            return (self.adapter, self.status, told[-1])
        return (self.adapter, self.status, *itertools.takewhile(lambda line: not line.startswith("  wanted"), told))

    def raise_if_broken(self) -> None:
        """Raise Violation for a finding, AssertionError for anything else that is neither a pass nor unpromised."""
        if self.finding is not None:
            found = self.finding
            where = f"{found.where}; replay with: fsdpcheck replay '{found.token}'"
            raise Violation(found.what, got=found.got, wanted=found.wanted, where=where, cause=found.cause)
        if self.exit_code != HOLDS:
            raise AssertionError(f"{self.law} on {self.adapter}: {self.status}: {self.reason}")

    def bounded(self) -> Verdict:
        """The verdict with excerpts of its texts: they may quote what an implementation says (errors/excerpt.py)."""
        finding = None if self.finding is None else self.finding.bounded()
        behind = tuple(one.bounded() for one in self.behind)
        return dataclasses.replace(self, reason=excerpt(self.reason, WHOLE), finding=finding, behind=behind)

    def to_data(self) -> dict[str, Any]:
        """As JSON data; ``from_data`` is its inverse."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Verdict:
        finding = data["finding"]
        several = {name: tuple(data.get(name, ())) for name in ("undrawn", "never", "left", "reached")}
        behind = tuple(Finding.from_data(one) for one in data.get("behind", ()))
        found = Finding.from_data(finding) if finding else None
        return Verdict(**{**data, **several, "finding": found, "behind": behind})


def exit_code(codes: Iterable[int]) -> int:
    """The code of a session: an internal error before a usage error before a finding before no progress."""
    seen = set(codes)
    return next((code for code in _WORST_FIRST if code in seen), HOLDS)
