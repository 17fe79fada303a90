"""Counterexample: the smallest case so far that breaks a law, and what is known of the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.execution import RunRequest
from fsdpcheck.findings.tokens import Token, encode
from fsdpcheck.findings.verdict import Finding
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import first_wrong, one_change, origin, own_lines, standings, uninitialised_memory
from fsdpcheck.judging.attribution import DIAGNOSED, Evidence
from fsdpcheck.judging.first_wrong import FirstWrong
from fsdpcheck.judging.known_root import seen
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import called
from fsdpcheck.judging.one_change import Tried
from fsdpcheck.judging.run import Run

_NOISE: Final = "the noise"
_COMPARED: Final = {
    r"noise\..*|state\.noise": _NOISE,
    r"samplers\..*": "the records that are drawn",
    r"lifecycle\.gathered": "memory that units hold",
    r"norms\.(?!refused).*|kernels\.(definition|bounded|order)": "the norms",
}
"""Laws that compare what no step of a single device has, or has otherwise -> what that is."""


@dataclass
class Counterexample:
    """What broke a law: ``finding`` of the newest case, which is the smallest, still without a cause."""

    finding: Finding
    violations: list[tuple[Case, Violation]]
    """Of failing cases: the first and the newest."""
    asked: RunRequest | None
    """What the newest run was asked for when the law broke."""
    evidence: Evidence = field(default_factory=Evidence)
    first_wrong: FirstWrong = field(default_factory=FirstWrong)
    tried: Tried = field(default_factory=Tried)
    """Changes of the smallest case."""
    lines: str = ""
    """Lines that the smallest case alone runs."""
    origin: str = ""
    """Where the wrong values come from, as far as that can be seen in all cases that fail alike."""
    memory: str = ""
    """The cause, if it is uninitialised memory."""

    @property
    def smallest(self) -> Case:
        return self.violations[-1][0]

    def look_further(
        self,
        law: Law,
        run: Run,
        cases: Iterable[tuple[Case, Exception | None]],
        holds: Callable[[Case], bool | None],
    ) -> None:
        """Learn of the cause from the smallest case, run again, and from further ``cases`` and what they raised.

        Then from the smallest case with one change at a time, of which ``holds`` says what comes of it.
        """
        smallest, minimal = self.violations[-1]
        self.memory = _unless_it_fails(lambda: uninitialised_memory.cause(law, run, smallest, minimal))
        if self.finding.kind == "value" and isinstance(smallest, TrainingCase) and not minimal.despite:
            with suppress(Exception):
                self.first_wrong = called(smallest, first_wrong.first_wrong, run, smallest, self.asked)
        with ExitStack() as stack:
            for case, error in cases:
                if error is None:
                    self.evidence.drawn.setdefault(case, False)
                elif isinstance(error, Violation) and error.what == minimal.what:
                    self.evidence.drawn.setdefault(case, True)
                    self._diagnose(case, error, stack)
            self._localise(law, run, smallest, holds)

    def _diagnose(self, case: Case, error: Violation, stack: ExitStack) -> None:
        """Learn causes of a further failing case; what fails in that is raised when all else has been looked at."""
        if len(self.evidence.causes) >= DIAGNOSED:
            return
        try:
            self.evidence.causes.append((case, error.causes))
        except Exception as failed:
            self.evidence.causes.append((case, None))
            stack.callback(_raise, failed)

    def _localise(self, law: Law, run: Run, smallest: Case, holds: Callable[[Case], bool | None]) -> None:
        with suppress(Exception):
            self.tried = one_change.tried(smallest, self.evidence.drawn, holds)
        failing = (smallest, *(case for case, failed in self.evidence.drawn.items() if failed and case != smallest))
        with suppress(Exception):
            if self.finding.kind in ("value", "raised"):
                self.origin = origin.of_cases(law, run, failing)
        with suppress(Exception):
            if self.finding.kind == "raised":  # where it was raised is told
                return
            self.lines = own_lines.of_case(law, run, failing, self.tried.holding)

    def diagnosed(self) -> Finding:
        """The finding with what the minimal case and all evidence say about its cause."""
        (began, first), (_, minimal) = self.violations[0], self.violations[-1]
        if first is not minimal and first.what == minimal.what:
            self.evidence.causes.append((began, first.causes))
        cause = self.memory or minimal.cause
        if not self.memory and (minimal.causes is not None or self._others_tell()):
            freezes = "frozen" in self.smallest.requires()
            cause = self.evidence.cause(minimal.causes, self.first_wrong, freezes, self.tried.holds)
        first_wrong, tried = self.first_wrong, self.tried
        return replace(
            self.finding,
            cause=cause,
            when="\n".join(filter(None, (one_change.in_words(tried), self.evidence.when()))),
            stage="\n".join(filter(None, (self._of_law(), first_wrong.text or self._unknown(), self.origin))),
            place=self.finding.place or first_wrong.place,
            quantity=first_wrong.quantity,
            holds_with=tried.holds,
            breaks_with=tried.breaks,
            lines=self.lines,
        )

    def _others_tell(self) -> bool:
        """Whether other cases speak for this one, which cannot tell by itself.

        Of what was raised they do not: a cause of theirs is one of ranks that came apart.
        """
        return self.finding.kind != "raised" and any(causes for _, causes in self.evidence.causes)

    def _of_law(self) -> str:
        """What the law compares is the first to differ, where nothing of its training does; "" where that is not known.

        Of noise, which is added to what is right in a training without it, that must have been seen to be right.
        """
        law, told = self.finding.law, self.first_wrong
        words = next((words for laws, words in _COMPARED.items() if re.fullmatch(laws, law)), "")
        if self.finding.kind != "value" or told.quantity or (words == _NOISE and not told.text):
            return ""
        return f"the first to differ, as the law compares it: {words}" if words else ""

    def _unknown(self) -> str:
        """That nothing is known of a wrong value, and why."""
        if self._of_law() or self.finding.kind != "value" or not isinstance(self.smallest, TrainingCase):
            return ""
        why = self.first_wrong.unknown
        return f"which quantity is wrong first is not known{f': {why}' if why else ''}"


def finding_of(law: Law, run: Run, case: Case, violation: Violation) -> Finding:
    """The finding that ``violation`` of ``law`` on ``case`` is, right after the run that broke it, without a cause."""
    kind, place = seen(run, violation)
    token = encode(Token(law.name, run.adapter_ref, case, run.installs, run.schedule, run.engine.kind))
    return Finding(
        law=law.name,
        guarantee=law.guarantee,
        adapter=run.adapter_ref,
        engine=run.engine.kind,
        kind=kind,
        place=place,
        what=violation.what,
        got=violation.got,
        wanted=violation.wanted,
        where=violation.where,
        cause="",
        case=json.loads(case.to_json()),
        words=case.describe(),
        token=token,
        laws=law.file,
        ranks=standings.ranks(run.ran.newest),
    )


def _raise(error: Exception) -> None:
    raise error


def _unless_it_fails(look: Callable[[], str]) -> str:
    """What a look at a finding says; nothing that goes wrong in it changes the verdict."""
    try:
        return look()
    except Exception:
        return ""
