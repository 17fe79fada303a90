"""KnownRoot: what is told already of one broken law, by which further cases that break it so are set aside."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpcheck.case import Case
from fsdpcheck.findings.verdict import Finding
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import one_change
from fsdpcheck.judging.run import Run


@dataclass(frozen=True)
class KnownRoot:
    """``finding`` with its causes. ``alike``: further cases that were judged and break the law so."""

    finding: Finding
    alike: set[Case] = field(default_factory=set)

    def has(self, case: Case, violation: Violation, run: Run) -> bool:
        """Whether ``violation`` of ``case``, the newest of ``run``, is of this root.

        Failures of one kind are at one line. Wrong values are where the law says the same of them, and the case is so
        with none of the changes that make the finding's hold: each of them was needed.
        """
        kind, place = seen(run, violation)
        if kind != self.finding.kind:
            return False
        if kind != "value":
            return place == self.finding.place
        return violation.what == self.finding.what and self.may_be_of(case)

    def may_be_of(self, case: Case) -> bool:
        """Whether ``case`` is so with none of the changes that make the finding's hold."""
        return one_change.lacks(case, self.finding.holds_with)


def seen(run: Run, violation: Violation) -> tuple[str, str]:
    """(kind, place) of a finding that ``violation`` gives, right after the run that broke the law.

    The place is where a rank raised, else the first of the lines at which ranks stand, whichever of them stands where.
    """
    failure = None if violation.despite else run.failure
    if failure is None:
        return "value", ""
    stood = [rank for rank in failure.ranks if rank.where]
    raised = [rank for rank in stood if rank.state == "raised"]
    return failure.kind, min((rank.where for rank in raised or stood), key=_in_order, default="")


def _in_order(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdigit() else 0
