"""Cases one after the other, outside any test of Hypothesis': a seed stands for the same cases on every machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.strategies import DataObject, SearchStrategy, booleans, data

from fsdpcheck.case import Case
from fsdpcheck.compat.hypothesis_private import whether_exhausted, without_local_constants, without_mutations

_DRAW: Final = (Phase.generate,)
_SHRINK: Final = (Phase.reuse, Phase.shrink)


class _Enough(BaseException):
    """Leaves Hypothesis at once."""


class _Met(Exception):
    """The case that is looked for is drawn."""


def each(
    strategy: SearchStrategy[Case],
    count: int,
    seed: int,
    take: Callable[[Case], None],
    *,
    climb: bool = False,
    shrink: bool = False,
) -> bool:
    """Call ``take`` on ``count`` cases of ``strategy``, equal ones too; whether there was nothing left to draw.

    With ``climb``, on cases near those for which it called ``hypothesis.target`` with the most, once half of them are
    drawn. With ``shrink``, on smaller cases once it has raised; cases that ``take`` has returned from are no such.

    Raises
    ------
    What ``take`` raised, on the smallest case; ``Unsatisfiable`` where Hypothesis finds no case.
    """
    phases = (*_DRAW, *([Phase.target] if climb else ()), *([Phase.shrink] if shrink else ()))
    with whether_exhausted() as ended:
        _test(strategy, count, seed, lambda case, data: take(case), database=None, phases=phases)
    return bool(ended)


def smaller(strategy: SearchStrategy[Case], count: int, seed: int, case: Case, judge: Callable[[Case], None]) -> None:
    """Call ``judge`` on ``case``, one of the ``count`` of this seed, and once it has raised on smaller ones.

    The case is drawn again, and shrunk from there in a search that knows nothing of other drawn cases: Hypothesis
    would take each that it has drawn for one on which ``judge`` did not raise, and they were not judged.

    Raises
    ------
    What ``judge`` raised on the smallest case, Hypothesis' Flaky among it.
    """
    seen = InMemoryExampleDatabase()

    def meet(drawn: Case, data: DataObject) -> None:
        if drawn == case:
            data.draw(booleans())  # Hypothesis shrinks what it has kept only where it is longer than it must be
            raise _Met

    with suppress(_Met):
        _test(strategy, count, seed, meet, database=seen, phases=_DRAW)
    _test(strategy, count, seed, lambda case, data: judge(case), database=seen, phases=_SHRINK)


def _test(
    strategy: SearchStrategy[Case], count: int, seed: int, take: Callable[[Case, DataObject], None], **options: Any
) -> None:
    """Have Hypothesis draw, or take from its database, what ``take`` is called with."""
    settings = hypothesis.settings(
        max_examples=count,
        derandomize=False,  # the seed decides
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),  # time is the engine's, acceptance is counted by us
        **options,
    )
    body = hypothesis.given(case=strategy, data=data())(lambda case, data: take(case, data))
    with without_local_constants(), without_mutations():
        settings(hypothesis.seed(seed)(body))()  # a seed takes the database away, so it comes first


def distinct(strategy: SearchStrategy[Case], count: int, seed: int = 0) -> list[Case]:
    """The first ``count`` distinct cases of a strategy, for studies that count and measure.

    Fewer when the strategy has no more, or repeats itself too often to find them.
    """
    cases: dict[Case, None] = {}

    def take(case: Case) -> None:
        cases[case] = None
        if len(cases) == count:
            raise _Enough

    with suppress(_Enough):
        each(strategy, 4 * count + 100, seed, take)
    return list(cases)
