"""Exploration: cases of one law are drawn on one implementation and judged, each; what breaks the law is kept."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Final, NoReturn

import hypothesis
from hypothesis.errors import Flaky

from fsdpcheck.case import Case
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact, Refused
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import census, coverage, model_refusals
from fsdpcheck.judging.attribution import CASES, Evidence
from fsdpcheck.judging.counterexample import Counterexample, finding_of
from fsdpcheck.judging.drawing import Batch
from fsdpcheck.judging.known_root import KnownRoot
from fsdpcheck.judging.model_process import called, gives_classes, judge
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import HOPELESS, UNLIKELY, Tally
from fsdpcheck.strategies import enumeration
from fsdpcheck.strategies import user_model as own_drawing

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.judging.law import Law

OnCase = Callable[["Law", Run, Case], None]


_CHOICE: Final = 6
"""Cases drawn for each that is judged, where few are."""
_AT_LEAST: Final = 60
"""Cases drawn at once, where that is no more than a choice; the profile says how many of them are judged."""
_AT_LEAST_LABELLED: Final = 10
"""The same of cases that have a label: one is enough of most, and those of a rare one are dear to draw."""
_VAIN: Final = 7
"""Batches in a row of which no case can be judged, before no other is drawn."""


class Rejected(Exception):
    """The case could not be judged; another is judged in its place."""


class SetAside(Exception):
    """The case breaks the law as ``known`` did, which is told already."""

    def __init__(self, known: KnownRoot) -> None:
        super().__init__(known)
        self.known = known


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
    known: tuple[KnownRoot, ...] = ()
    """What is told already: cases that break the law so are set aside."""
    broken: Counterexample | None = None
    branches: Counter[int] = field(default_factory=Counter)
    """How many cases ran each branch of the implementation, where that is measured."""
    undiagnosed: str = ""
    """What went wrong while the cause of a finding was looked for."""
    _patience: int | None = None
    """How many rejected cases a search for a label has left."""
    _drawn: Evidence = field(default_factory=Evidence)

    def explore(self, most: int) -> BaseException | None:
        """Judge cases until ``most`` are, and more for labels that must occur; what ended it early, or None."""
        left = most - self.tally.passed
        return (self._draw(left) if left > 0 else None) or self._reach()

    def behind(self, *known: KnownRoot) -> Exploration:
        """The exploration of what is left: it goes on with the cases that this one has not judged."""
        held = Evidence(drawn={case: False for case, failed in self._drawn.drawn.items() if not failed})
        return replace(self, known=known, broken=None, undiagnosed="", _patience=None, _drawn=held)

    def judge(self, case: Case) -> None:
        """Judge one case. Raises Violation, SetAside, Rejected and Stop."""
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
            if (known := self._known(case, violation)) is not None:
                raise SetAside(known) from violation
            self.breaks(case, violation)
            raise
        except Exception as error:
            raise Stop(error, case) from error
        finally:
            self.tally.left.update(self.run.ran.left)
        if self.broken is None:  # else it is a case that shrinking visits
            self._drawn.drawn[case] = False
            self.tally.passed += 1
        self.tally.reach(self.run.ran.reached)
        self.branches.update(self.run.ran.branches)
        self.count(case)

    def _ask(self, case: Case) -> None:
        """Have the law judge ``case``: what breaks it by executions that others asked for must break it by new ones."""
        self.run.executions.begin()
        try:
            return judge(self.law, case, self.run)
        except Violation:
            again, self.run = self.run.executions.recalled, replace(self.run, recalls=False)
            if not again:
                raise
        self.run.executions.forget()
        self.run.ran.clear()
        judge(self.law, case, self.run)

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

    def _known(self, case: Case, violation: Violation) -> KnownRoot | None:
        """What is told already and breaks the law as ``case`` does, which was just run."""
        return next((one for one in self.known if one.has(case, violation, self.run)), None)

    def count(self, case: Case) -> None:
        new = () if case in self.tally.judged else census.labels(case, self.run)
        self.tally.count(case, new, self.run.ran.hits)

    def refused_for_mixing(self, case: Case) -> bool:
        """Whether what broke the law is a user's model that mixes samples, and no implementation; it is noted."""
        try:
            report = called(case, model_refusals.mixes, case) if self.run.failure is None else ""
        except Exception:  # nothing that goes wrong here changes the verdict
            report = ""
        if report:
            self.tally.refused[case] = report
        return bool(report)

    def look_further(self) -> None:
        """Judge further cases for what they say about the cause; ends early when the budget does. Raises nothing."""
        assert self.broken is not None
        try:
            self.broken.look_further(self.law, self.run, self._further(), self._holds)
        except Exception:
            self.undiagnosed = traceback.format_exc().rstrip()

    def _holds(self, case: Case) -> bool | None:
        """Whether the law holds on a changed case; None where that cannot be told, or the budget is spent."""
        if not self.run.features.takes(case, self.law.space.added):
            return None
        for _, error in self._judged((case,)):
            return None if error is not None and not isinstance(error, Violation) else error is None
        return None

    def _further(self) -> Iterator[tuple[Case, Exception | None]]:
        """Further cases with what each raised; nothing that goes wrong in one changes the verdict."""
        cases = cases_of(self.law, self.run, self.world_sizes)
        yield from self._judged(enumeration.distinct(cases, CASES, seed_of(f"{self.law.name} further", self.seed)))

    def _judged(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Exception | None]]:
        """Cases with what each raised, as long as there is time."""
        for case in cases:
            if self.deadline is not None and time.monotonic() > self.deadline:
                return
            if self.on_case is not None:
                self.on_case(self.law, self.run, case)
            self.run.ran.clear()
            try:
                judge(self.law, case, self.run)
            except Violation as violation:
                known = self._known(case, violation)
                yield case, violation if known is None else SetAside(known)
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
        """Have another case judged in place of one that could not be."""
        if self._patience is not None and self.broken is None:
            self._patience -= 1
        if self.tally.hopeless or self._patience == 0:
            raise Stop(None, None) from error
        raise Rejected from error

    def _reach(self) -> BaseException | None:
        """Have cases drawn for each label that must occur, or is sought, and has not; what ended it, or None."""
        tally = self.tally
        for label in tally.unreached if self.broken is None and tally.enough else ():
            few = tally.wanted if coverage.LABELS[label].computed else 1
            if label in tally.unreached and self.broken is None:
                self._patience = UNLIKELY if coverage.LABELS[label].sought else HOPELESS
                stop = self._draw(few, label)
                if stop is not None and self._patience:
                    return stop
        return None

    def _draw(self, most: int, label: str = "") -> BaseException | None:
        """Judge ``most`` of the cases that are drawn, or fewer that have ``label``; what ended it early, or None."""
        try:
            return self._judge_drawn(most, label)
        except (Exception, Stop) as stop:
            return stop

    def _judge_drawn(self, most: int, label: str) -> BaseException | None:
        tally, wanted, vain = self.tally, self.tally.passed + most, 0
        for batch, drawn in self._batches(most, label):
            cases = sorted(drawn, key=self._may_be_known)
            before, known = tally.passed, {*tally.judged, *tally.rejected, *tally.refused}
            for case, following in zip_longest(cases, cases[1:]):
                if case in known:
                    continue
                if following is not None and tally.passed + 1 < wanted:
                    self._work_ahead(following)
                try:
                    self._judge_or_count(case)
                except SetAside as aside:
                    tally.passed += 1
                    aside.known.alike.add(case)
                    self.count(case)
                except Rejected:
                    continue
                except Violation:
                    return self._make_smaller(batch, case) if self.shrink else None
                if tally.passed >= wanted or (label and label not in tally.unreached):
                    return None
            vain = 0 if tally.passed > before else vain + 1
            if vain == _VAIN or not cases:
                return None
        return None

    def _may_be_known(self, case: Case) -> bool:
        """Whether ``case`` would break the law as a known root does, if it breaks it: others are judged before."""
        return any(known.may_be_of(case) for known in self.known)

    def _work_ahead(self, following: Case) -> None:
        """Have the answer of the case that is judged next computed while the ranks of this one compute."""
        if isinstance(self.run.engine, SimulatedEngine):
            self.run.engine.meanwhile = partial(self.run.prepare, following)

    def _judge_or_count(self, case: Case) -> None:
        """Judge a case of a batch, or count it once more: of few cases there are, a batch has many equal ones."""
        if case in self.tally.judged:
            self.tally.passed += 1
        elif case not in self.tally.rejected and case not in self.tally.refused:
            self.judge(case)

    def _batches(self, most: int, label: str) -> Iterator[tuple[Batch, tuple[Case, ...]]]:
        """Batches with their cases in the order of judging, for ever or until there are no other cases."""
        cases = cases_of(self.law, self.run, self.world_sizes)
        wanted = coverage.LABELS[label].within if label and coverage.LABELS[label].computed else label
        if wanted:
            cases = cases.filter(partial(coverage.has, label=wanted))
        size = max(most, _AT_LEAST_LABELLED if label else min(_CHOICE * most, _AT_LEAST))
        space = self.law.space.drawn.key
        for number in count():
            seed = seed_of(" ".join((space, *filter(None, (label, str(number or ""))))), self.seed)
            batch = Batch(cases, size, seed, most)
            implementation = self.run.adapter_ref, self.run.avoid, self.run.own
            drawn = self.run.drawings.of((implementation, space, self.world_sizes, seed, size, most), batch)
            yield batch, drawn.cases
            if drawn.all_there_are:
                self.tally.exhausted = True
                return

    def _make_smaller(self, batch: Batch, broke: Case) -> BaseException | None:
        """Have the case that broke the law made smaller; what ended that, or None."""

        def judge(case: Case) -> None:
            try:
                self.judge(case)
            except (Rejected, SetAside):
                hypothesis.reject()

        try:
            batch.shrink(broke, judge)
        except Violation:
            return None
        return Flaky("the law broke, and then held on the same case")


def sizes_for(law: Law, world_sizes: tuple[int, ...], most: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks on which the law says something, those of at most ``most`` ranks."""
    return tuple(size for size in world_sizes if law.space.ranks <= size <= (most or size))


def cases_of(law: Law, run: Run, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    if run.own is None:
        return law.draw(run.features, world_sizes)
    return own_drawing.cases(law.draw, run.features, world_sizes, run.own, gives_classes(run.own))


def seed_of(law: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{law}:{seed}".encode()).digest()[:8])
