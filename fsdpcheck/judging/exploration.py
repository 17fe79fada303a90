"""One law on one implementation while cases are drawn: each judged, what broke kept, and the verdict in the end."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NoReturn

import hypothesis
from hypothesis.errors import Flaky, HypothesisException, Unsatisfiable

from fsdpcheck.case import Case
from fsdpcheck.case.profiles import WORLD_SIZES
from fsdpcheck.case.traits import OF_MODELS
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import (
    FINDING,
    INTERNAL,
    NO_PROGRESS,
    USAGE,
    FsdpcheckError,
    NotApplicable,
    NotExact,
    NotOnRanks,
    OtherWorldSize,
    Refused,
)
from fsdpcheck.execution import RunRequest
from fsdpcheck.findings.tokens import Token, command, encode
from fsdpcheck.findings.verdict import Finding, Verdict, exit_code
from fsdpcheck.findings.violation import Violation  # fmt: skip
from fsdpcheck.judging import attribution as evidence
from fsdpcheck.judging import census, coverage, model_refusals, nondeterminism, uninitialised_memory
from fsdpcheck.judging.attribution import CASES, DIAGNOSED, Evidence
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration
from fsdpcheck.strategies import user_model as own_drawing

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.judging.law import Law

HOPELESS: Final = 40
"""Cases rejected or refused in vain before drawing ends, where it is not for any case: each may take a build or a run.

So with a user's own model of which none was judged, and in the search for cases with a label that has not occurred.
"""

UNLIKELY: Final = 10
"""The same where such a case is sought and not demanded."""

_OTHER_NUMBERS: Final = "try --real: the model as it is, its own weights, judged by the rounding laws"
_OTHER_CASES: Final = "have the adapter accept or show more, avoid fewer traits, or take the promise away"
_OTHER_LAWS: Final = "leave this law out (--law), or put another function in that place: nothing is claimed of it"

_OTHER_RANKS: Final = "ask for other numbers of ranks as well (--world-size), or leave this law out (--law)"

_CODES: Final[dict[coverage.Cause, int]] = {
    "budget": NO_PROGRESS, "restriction": USAGE, "ranks": USAGE, "drawing": INTERNAL,
}  # fmt: skip

OnCase = Callable[["Law", Run, Case], None]


def finding_of(law: Law, run: Run, case: Case, violation: Violation) -> Finding:
    """The finding that ``violation`` of ``law`` on ``case`` is, right after the run that broke it, without a cause."""
    failure = None if violation.despite else run.failure
    token = encode(Token(law.name, run.adapter_ref, case, run.installs, run.schedule, run.engine.name))
    return Finding(
        law=law.name,
        guarantee=law.guarantee,
        adapter=run.adapter_ref,
        engine=run.engine.name,
        kind=failure.kind if failure else "value",
        place=next((rank.where for rank in failure.ranks if rank.where), "") if failure else "",
        what=violation.what,
        got=violation.got,
        wanted=violation.wanted,
        where=violation.where,
        cause="",
        case=json.loads(case.to_json()),
        words=case.describe(),
        token=token,
        laws=law.file,
    )


class Stop(BaseException):
    """Leaves Hypothesis at once, whatever it is doing. ``error`` is None when the budget is spent."""

    def __init__(self, error: Exception | None, case: Case | None) -> None:
        super().__init__(error, case)
        self.error, self.case = error, case


@dataclass
class Judging:
    """One law on one run while Hypothesis draws: what was judged, rejected, broken."""

    law: Law
    run: Run
    on_case: OnCase | None
    deadline: float | None
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
    patience: int | None = None
    """How many rejected cases a search for a label has left."""
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
    left: dict[str, None] = field(default_factory=dict)
    """What was left changed of the process by any run, a sentence each."""
    hits: Counter[str] = field(default_factory=Counter)
    broken: Finding | None = None
    violations: list[tuple[Case, Violation]] = field(default_factory=list)
    """Of failing cases: the first and the newest, which is the smallest."""
    asked: RunRequest | None = None
    """What the newest run was asked for when the law broke."""
    evidence: Evidence = field(default_factory=Evidence)
    stage: str = ""
    memory: str = ""
    """The cause, if it is uninitialised memory."""
    undiagnosed: str = ""
    """What went wrong while the cause of a finding was looked for."""

    def judge(self, case: Case) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise Stop(None, None)
        if self.on_case is not None:
            self.on_case(self.law, self.run, case)
        self.run.ran.clear()
        try:
            self.law.body(case, self.run)
        except NotExact as error:
            self.rejected.add(case)
            self.unfit |= {case} if isinstance(error, NotApplicable) else set()
            self.elsewhere |= {case} if isinstance(error, NotOnRanks) else set()
            self.reasons[str(error)] += 1
            self._next(error)
        except Refused as error:
            self.refused[case] = str(error)
            self._next(error)
        except Violation as violation:
            if self.refused_for_mixing(case):
                self._next(violation)
            self._break(case, violation)
            self._count(case)
            raise
        except HypothesisException:
            raise
        except Exception as error:
            raise Stop(error, case) from error
        finally:
            self.left.update(self.run.ran.left)
        if self.broken is None:
            self.evidence.drawn[case] = False
        self.passed += 1
        self._count(case)

    def refused_for_mixing(self, case: Case) -> bool:
        """Whether what broke the law is a user's model that mixes samples, and no implementation; it is noted."""
        try:
            report = model_refusals.mixes(case) if self.run.failure is None else ""
        except Exception:  # nothing that goes wrong here changes the verdict
            report = ""
        if report:
            self.refused[case] = report
        return bool(report)

    def _next(self, error: Exception) -> NoReturn:
        """Have another case drawn in place of one that could not be judged."""
        if self.patience is not None and self.broken is None:
            self.patience -= 1
        if self.hopeless or self.patience == 0:
            raise Stop(None, None) from error
        hypothesis.reject()

    @property
    def hopeless(self) -> bool:
        """Whether a user's own model gave no case that could be judged, of as many as say that it never will."""
        return self.run.own is not None and not self.judged and len(self.rejected) + len(self.refused) >= HOPELESS

    def _break(self, case: Case, violation: Violation) -> None:
        if self.broken is None:
            self.evidence.drawn[case] = True
        self.broken = finding_of(self.law, self.run, case, violation)
        self.violations, self.asked = [*self.violations[:1], (case, violation)], self.run.asked

    def broken_by(self, case: Case, violation: Violation, diagnose: bool) -> Verdict:
        """The verdict of one case alone."""
        self.left.update(self.run.ran.left)
        self._break(case, violation)
        self._count(case)
        assert self.broken is not None
        if not diagnose:
            return replace(self._held, status="finding", finding=self.broken, exit_code=FINDING)
        if self.run.engine.name == "simulated":
            self.look_further(sizes_for(self.law, WORLD_SIZES["quick"]), 0)
        return self._finding(self.broken, "")

    def _count(self, case: Case) -> None:
        self.hits.update(self.run.ran.hits)
        if case not in self.judged:
            self.judged.add(case)
            self.census.update(census.labels(case, self.run))

    def look_further(self, world_sizes: tuple[int, ...], seed: int) -> None:
        """Judge further cases for what they say about the cause; ends early when the budget does. Raises nothing."""
        try:
            self._look_further(world_sizes, seed)
        except Exception:
            self.undiagnosed = traceback.format_exc().rstrip()

    def _look_further(self, world_sizes: tuple[int, ...], seed: int) -> None:
        assert self.broken is not None
        smallest, minimal = self.violations[-1]
        self.memory = self._memory(smallest, minimal)
        if self.broken.kind == "value" and smallest.trains and not minimal.despite:
            self.stage = self._stage(smallest)
        cases = cases_of(self.law, self.run, world_sizes)
        for case in enumeration.distinct(cases, CASES, seed_of(f"{self.law.name} further", seed)):
            if self.deadline is not None and time.monotonic() > self.deadline:
                return
            violation = self._tried(case)
            if violation is None:
                self.evidence.drawn.setdefault(case, False)
            elif isinstance(violation, Violation) and violation.what == minimal.what:
                self.evidence.drawn.setdefault(case, True)
                if len(self.evidence.causes) < DIAGNOSED:
                    self.evidence.causes.append(violation.causes)

    def _memory(self, case: Case, violation: Violation) -> str:
        """Whether memory that nobody has written is the cause; nothing that goes wrong here changes the verdict."""
        try:
            return uninitialised_memory.cause(self.law, self.run, case, violation)
        except Exception:
            return ""

    def _stage(self, case: Case) -> str:
        """What of a step differs first; nothing that goes wrong here changes the verdict."""
        try:
            return evidence.stage(self.run, case, self.asked)
        except Exception:
            return ""

    def _tried(self, case: Case) -> Exception | None:
        """What a case raises; nothing that goes wrong here changes the verdict."""
        if self.on_case is not None:
            self.on_case(self.law, self.run, case)
        self.run.ran.clear()
        try:
            self.law.body(case, self.run)
        except Exception as error:
            return error
        return None

    def _diagnosed(self, found: Finding) -> Finding:
        """The finding with what the minimal case and all evidence say about its cause."""
        first, minimal = self.violations[0][1], self.violations[-1][1]
        if first is not minimal and first.what == minimal.what:
            self.evidence.causes.append(first.causes)
        if self.memory:
            return replace(found, cause=self.memory, when=self.evidence.when(), stage=self.stage)
        cause = minimal.cause
        if minimal.causes is not None or any(self.evidence.causes):
            cause = self.evidence.cause(minimal.causes)
        return replace(found, cause=cause, when=self.evidence.when(), stage=self.stage)

    def verdict(self, stop: BaseException | None) -> Verdict:
        """The verdict, given what ended the drawing (None: Hypothesis is done)."""
        if isinstance(stop, Flaky) and self.broken is not None:
            return self._flaky(self.broken)
        if self.broken is not None:
            return self._shrunk(self.broken, stop)
        if isinstance(stop, Stop) and isinstance(stop.error, OtherWorldSize):
            reason = f"on {stop.error.there} ranks alone: its cases run on other numbers of ranks as well"
            return replace(self._held, status="not asked", reason=reason)
        if isinstance(stop, Stop) and stop.error is not None:
            return self._error(stop.error, stop.case)
        stop = None if self.hopeless else stop
        spent = isinstance(stop, Stop)
        if stop is not None and not spent and not isinstance(stop, Unsatisfiable):
            return self._error(stop, None)
        if self.refused:
            return self.not_supported
        if not self.judged:
            return self._no_case(spent)
        if short := coverage.shortfall(self.labels, self.limits, self._outcome(spent)):
            told = replace(self._held, status="too few cases", reason=short.reason, exit_code=_CODES[short.cause])
            return self._not_here(told) if short.cause == "ranks" else told
        never = [name for name in self.run.installs if not self.hits[name]]
        notes = ["the budget was spent before all cases were drawn"] * spent
        notes += [f"never hit, so this says nothing of it: {', '.join(never)}"] * bool(never)
        return replace(self._held, reason="; ".join(notes))

    @property
    def _held(self) -> Verdict:
        """What would be said if nothing had gone wrong."""
        census = dict(sorted(self.census.items()))
        counts = (len(self.judged), len(self.rejected))
        return Verdict(
            self.law.name,
            self.run.adapter_ref,
            "holds",
            *counts,
            census=census,
            undrawn=self._undrawn,
            never=self._never,
            left=tuple(self.left),
        )

    def _outcome(self, spent: bool) -> coverage.Judged:
        """What came of the drawing, as data."""
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

    @property
    def enough(self) -> bool:
        """Whether the least number of cases was judged, or all there are."""
        return self._outcome(False).enough

    @property
    def unreached(self) -> tuple[str, ...]:
        """Labels that must occur, or are sought, and that no judged case has so far."""
        return coverage.missing((*self.labels, *self.sought), self.census)

    @property
    def _never(self) -> tuple[str, ...]:
        """What the law names and no judged case was, in words."""
        accepts = self.run.declared.features.accepts  # what it does not accept is told once for all laws
        labels = dict.fromkeys((*self.law.space.vacuous_without, *self.law.space.must_occur))
        named = [label for label in labels if coverage.LABELS[label].traits <= accepts]
        return tuple(coverage.LABELS[label].words for label in coverage.missing(named, self.census))

    @property
    def not_supported(self) -> Verdict:
        """What is said of a model that the adapter refuses, if only in some cases: no pass."""
        reports = (text for text, _ in Counter(self.refused.values()).most_common())
        reason = model_refusals.verdict_text(reports, len(self.refused), len(self.judged))
        return replace(self._held, status="not supported", reason=reason, exit_code=USAGE)

    @property
    def _undrawn(self) -> tuple[str, ...]:
        """Accepted traits that no judged case demanded; none for laws whose cases train nothing."""
        if not any(case.trains for case in self.judged):
            return ()
        fixed = OF_MODELS if self.run.own is not None else frozenset()
        return tuple(sorted(self.run.features.accepts - set(self.census) - fixed))

    def _finding(self, found: Finding, note: str) -> Verdict:
        try:
            found = self._diagnosed(found)
        except Exception:
            self.undiagnosed = self.undiagnosed or traceback.format_exc().rstrip()
        if not self.undiagnosed:
            return replace(self._held, status="finding", finding=replace(found, note=note), exit_code=FINDING)
        notes = [note] * bool(note) + [f"fsdpcheck failed to look for the cause: {self.undiagnosed}"]
        told = replace(found, note="; ".join(notes))
        return replace(self._held, status="finding", finding=told, exit_code=INTERNAL)

    def _shrunk(self, found: Finding, stop: BaseException | None) -> Verdict:
        """The finding, given what ended its shrinking: an error in another case takes nothing from it, and is told."""
        if stop is None:
            return self._finding(found, "")
        error, case = (stop.error, stop.case) if isinstance(stop, Stop) else (stop, None)
        if error is None:
            return self._finding(found, "the budget ended the shrinking; a smaller case may exist")
        ended = self._error(error, case)
        told = self._finding(found, f"an error ended the shrinking; a smaller case may exist: {ended.reason}")
        return replace(told, exit_code=exit_code((told.exit_code, ended.exit_code)))

    def _flaky(self, found: Finding) -> Verdict:
        reason = (
            f"the law broke and then held on the same case, so the run is not deterministic ({found.what}); gloo"
            " processes showed no difference: state that simulated ranks share (Features.rank_local), or an error of"
            f" fsdpcheck; replay with: {command(found.token, found.adapter, self.run.installs, [self.law.file])}"
        )
        return replace(self._held, status="error", reason=reason, exit_code=INTERNAL)

    def varied(self, case: Case, asked: RunRequest | None, stop: BaseException | None) -> Verdict | None:
        """The finding that ``asked`` of ``case`` gives other results each time; None where it does not.

        It is looked for on processes if it varies on the engine of the run, or if the law did (``stop``).
        """
        if asked is None or not (isinstance(stop, Flaky) or nondeterminism.varies(self.run, asked)):
            return None
        violation = nondeterminism.difference(self.run, asked)
        if violation is None:
            return None
        self._count(case)
        found = finding_of(self.law, self.run, case, violation)
        told = replace(found, kind="undetermined", engine="processes", place="")
        return replace(self._held, status="finding", finding=told, exit_code=FINDING)

    def _no_case(self, spent: bool) -> Verdict:
        if spent:
            return replace(
                self._held, status="no case", reason="the budget was spent before the first case", exit_code=NO_PROGRESS
            )
        unfit = 2 * len(self.unfit) > len(self.rejected)
        reason = f"promised, but no case could be judged: {len(self.rejected)} drawn and rejected"
        reason += "" if unfit else " as not exact"
        reason += "".join(f"\n  most often: {text}" for text, _ in self.reasons.most_common(1))
        if self.run.own is not None:
            real = any(case.arithmetic.numbers == "real" for case in self.rejected)
            reason += f"\n  next    {_OTHER_LAWS if real else _OTHER_NUMBERS}"
            return replace(self._held, status="no case", reason=reason, exit_code=USAGE)
        if self._outcome(spent).needs_other_ranks:
            reason += f"\n  next    {_OTHER_RANKS}"
            return self._not_here(replace(self._held, status="no case", reason=reason, exit_code=USAGE))
        if unfit:
            reason += f"\n  next    {_OTHER_CASES}"
            return replace(self._held, status="no case", reason=reason, exit_code=USAGE)
        return replace(self._held, status="no case", reason=reason, exit_code=INTERNAL)

    def _not_here(self, told: Verdict) -> Verdict:
        """``told`` of cases that are kept out by the number of ranks; under torchrun nobody chose it for the law."""
        if self.run.engine.name != TORCHRUN:
            return told
        why = self.reasons.most_common(1)[0][0]
        return replace(told, status="not asked", reason=f"on {max(self.limits.world_sizes)} ranks: {why}", exit_code=0)

    def _error(self, error: BaseException, case: Case | None) -> Verdict:
        reason = str(error)
        if not isinstance(error, FsdpcheckError):
            reason = "".join(traceback.format_exception(error)).rstrip()
        if case is not None:
            token = encode(Token(self.law.name, self.run.adapter_ref, case, self.run.installs))
            again = command(token, self.run.adapter_ref, self.run.installs, [self.law.file])
            reason += f"\nin case {case.describe()}\nreplay with: {again}"
        return replace(self._held, status="error", reason=reason, exit_code=getattr(error, "exit_code", INTERNAL))


def sizes_for(law: Law, world_sizes: tuple[int, ...], most: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks on which the law says something, those of at most ``most`` ranks."""
    return tuple(size for size in world_sizes if law.space.ranks <= size <= (most or size))


def cases_of(law: Law, run: Run, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    if run.own is None:
        return law.draw(run.features, world_sizes)
    return own_drawing.cases(law.draw, run.features, world_sizes, run.own)


def seed_of(law: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{law}:{seed}".encode()).digest()[:8])
