"""Cases one after the other, outside any test of Hypothesis': a seed stands for the same cases on every machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.strategies import SearchStrategy

from fsdpcheck.case import Case
from fsdpcheck.compat.hypothesis_private import whether_exhausted, without_local_constants, without_mutations

_PHASES: Final = (Phase.generate, Phase.target, Phase.shrink)


class _Enough(BaseException):
    """Leaves Hypothesis at once."""


def each(
    strategy: SearchStrategy[Case],
    count: int,
    seed: int,
    take: Callable[[Case], None],
    *,
    shrink: bool = False,
    climb: bool = False,
) -> bool:
    """Call ``take`` on ``count`` cases of ``strategy``, equal ones too; whether there was nothing left to draw.

    With ``shrink``, ``take`` is called on smaller cases once it has raised. With ``climb``, on cases near those for
    which it called ``hypothesis.target`` with the most, once half of them are drawn.

    Raises
    ------
    What ``take`` raised on the smallest case, Hypothesis' Flaky among it; ``Unsatisfiable`` where it finds no case.
    """
    wanted = {Phase.generate, *([Phase.shrink] if shrink else ()), *([Phase.target] if climb else ())}
    settings = hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        phases=tuple(phase for phase in _PHASES if phase in wanted),
        suppress_health_check=list(HealthCheck),  # time is the engine's, acceptance is counted by us
    )
    body = hypothesis.given(case=strategy)(lambda case: take(case))
    with without_local_constants(), without_mutations(), whether_exhausted() as ended:
        hypothesis.seed(seed)(settings(body))()
    return bool(ended)


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
