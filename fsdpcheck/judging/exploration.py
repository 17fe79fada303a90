"""Exploration: cases of one law are drawn on one implementation and judged, each; what breaks the law is kept."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import hypothesis
from hypothesis.errors import HypothesisException, Unsatisfiable

from fsdpcheck.case import Case
from fsdpcheck.compat.hypothesis_private import whether_exhausted, without_local_constants, without_mutations
from fsdpcheck.errors import NotExact, Refused
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import census, coverage, model_refusals
from fsdpcheck.judging.attribution import CASES, Evidence
from fsdpcheck.judging.counterexample import Counterexample, finding_of
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import HOPELESS, UNLIKELY, Tally
from fsdpcheck.strategies import enumeration
from fsdpcheck.strategies import user_model as own_drawing

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.judging.law import Law

OnCase = Callable[["Law", Run, Case], None]


class Stop(BaseException):
    """Leaves Hypothesis at once, whatever it is doing. ``error`` is None when the budget is spent."""

    def __init__(self, error: Exception | None, case: Case | None) -> None:
        super().__init__(error, case)
        self.error, self.case = error, case


@dataclass
class Exploration:
    """One law on one run. ``on_case`` is called before each case runs; ``deadline`` (time.monotonic) ends the drawing.

    ``shrink``: whether a case that breaks the law is made smaller.
    """

    law: Law
    run: Run
    tally: Tally
    world_sizes: tuple[int, ...]
    on_case: OnCase | None = None
    deadline: float | None = None
    seed: int = 0
    shrink: bool = True
    broken: Counterexample | None = None
    undiagnosed: str = ""
    """What went wrong while the cause of a finding was looked for."""
    _patience: int | None = None
    """How many rejected cases a search for a label has left."""
    _drawn: Evidence = field(default_factory=Evidence)

    def explore(self, most: int) -> BaseException | None:
        """Judge ``most`` cases, and more for labels that must occur; what ended it early, or None."""
        return self._draw(most) or self._reach()

    def judge(self, case: Case) -> None:
        """Judge one case that Hypothesis has drawn. Raises Violation, Stop, and what has another case drawn."""
        self._begin(case)
        try:
            self._ask(case)
        except NotExact as error:
            self.tally.reject(case, error)
            self._next(error)
        except Refused as error:
            self.tally.refused[case] = str(error)
            self._next(error)
        except Violation as violation:
            if self.refused_for_mixing(case):
                self._next(violation)
            self.breaks(case, violation)
            raise
        except HypothesisException:
            raise
        except Exception as error:
            raise Stop(error, case) from error
        finally:
            self.tally.left.update(self.run.ran.left)
        if self.broken is None:
            self._drawn.drawn[case] = False
        self.tally.passed += 1
        self.count(case)

    def _ask(self, case: Case) -> None:
        """Have the law judge ``case``: what breaks it by executions that others asked for must break it by new ones."""
        self.run.executions.begin()
        try:
            return self.law.body(case, self.run)
        except Violation:
            again, self.run = self.run.executions.recalled, replace(self.run, recalls=False)
            if not again:
                raise
        self.run.executions.forget()
        self.run.ran.clear()
        self.law.body(case, self.run)

    def breaks(self, case: Case, violation: Violation) -> None:
        """``case`` breaks the law, and is smaller than what broke it before."""
        found = finding_of(self.law, self.run, case, violation)
        if self.broken is None:
            self._drawn.drawn[case] = True
            self.broken = Counterexample(found, [(case, violation)], self.run.asked, self._drawn)
        else:
            kept = self.broken.violations[:1]
            self.broken.finding, self.broken.asked = found, self.run.asked
            self.broken.violations = [*kept, (case, violation)]
        self.tally.left.update(self.run.ran.left)
        self.count(case)

    def count(self, case: Case) -> None:
        new = () if case in self.tally.judged else census.labels(case, self.run)
        self.tally.count(case, new, self.run.ran.hits)

    def refused_for_mixing(self, case: Case) -> bool:
        """Whether what broke the law is a user's model that mixes samples, and no implementation; it is noted."""
        try:
            report = model_refusals.mixes(case) if self.run.failure is None else ""
        except Exception:  # nothing that goes wrong here changes the verdict
            report = ""
        if report:
            self.tally.refused[case] = report
        return bool(report)

    def look_further(self) -> None:
        """Judge further cases for what they say about the cause; ends early when the budget does. Raises nothing."""
        assert self.broken is not None
        try:
            self.broken.look_further(self.law, self.run, self._further())
        except Exception:
            self.undiagnosed = traceback.format_exc().rstrip()

    def _further(self) -> Iterator[tuple[Case, Exception | None]]:
        """Further cases with what each raised; nothing that goes wrong in one changes the verdict."""
        cases = cases_of(self.law, self.run, self.world_sizes)
        for case in enumeration.distinct(cases, CASES, seed_of(f"{self.law.name} further", self.seed)):
            if self.deadline is not None and time.monotonic() > self.deadline:
                return
            if self.on_case is not None:
                self.on_case(self.law, self.run, case)
            self.run.ran.clear()
            try:
                self.law.body(case, self.run)
            except Exception as error:
                yield case, error
            else:
                yield case, None

    def _begin(self, case: Case) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise Stop(None, None)
        if self.on_case is not None:
            self.on_case(self.law, self.run, case)
        self.run.ran.clear()

    def _next(self, error: Exception) -> NoReturn:
        """Have another case drawn in place of one that could not be judged."""
        if self._patience is not None and self.broken is None:
            self._patience -= 1
        if self.tally.hopeless or self._patience == 0:
            raise Stop(None, None) from error
        hypothesis.reject()

    def _reach(self) -> BaseException | None:
        """Have cases drawn for each label that must occur, or is sought, and has not; what ended it, or None."""
        tally = self.tally
        for label in tally.unreached if self.broken is None and tally.enough else ():
            few = tally.wanted if coverage.LABELS[label].computed else 1
            if label in tally.unreached and self.broken is None:
                self._patience = UNLIKELY if coverage.LABELS[label].sought else HOPELESS
                stop = self._draw(few, label)
                if stop is not None and not isinstance(stop, Unsatisfiable) and self._patience:
                    return stop
        return None

    def _draw(self, most: int, label: str = "") -> BaseException | None:
        """Let Hypothesis draw, cases that may have ``label``; what ended it, or None when it drew all it wanted."""
        settings = hypothesis.settings(
            max_examples=most,
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=hypothesis.Verbosity.quiet,
            phases=(hypothesis.Phase.generate, *((hypothesis.Phase.shrink,) if self.shrink else ())),
            suppress_health_check=list(hypothesis.HealthCheck),  # time is the engine's, acceptance is counted by us
        )
        try:
            cases = cases_of(self.law, self.run, self.world_sizes)
            if label and not coverage.LABELS[label].computed:
                cases = cases.filter(partial(coverage.has, label=label))
            body = hypothesis.given(case=cases)(lambda case: self.judge(case))
            with without_local_constants(), without_mutations(), whether_exhausted() as ended:
                hypothesis.seed(seed_of(f"{self.law.space.drawn.key} {label}".rstrip(), self.seed))(settings(body))()
        except Violation:
            return None
        except (Exception, Stop) as stop:
            return stop
        self.tally.exhausted = self.tally.exhausted or bool(ended)
        return None


def sizes_for(law: Law, world_sizes: tuple[int, ...], most: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks on which the law says something, those of at most ``most`` ranks."""
    return tuple(size for size in world_sizes if law.space.ranks <= size <= (most or size))


def cases_of(law: Law, run: Run, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    if run.own is None:
        return law.draw(run.features, world_sizes)
    return own_drawing.cases(law.draw, run.features, world_sizes, run.own)


def seed_of(law: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{law}:{seed}".encode()).digest()[:8])
