"""Executions that laws share: which are given, and that nothing breaks a law by one of them alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdpcheck.case import TrainingCase
from fsdpcheck.execution import Execution, Failure, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.executions import _KEPT, Executions
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from tests.common.laws_by_hand import FakeEngine, a_law


def _once(case: TrainingCase, run: Run) -> None:
    run(case)


def _twice(case: TrainingCase, run: Run) -> None:
    run(case), run(case)


def _otherwise(case: TrainingCase, run: Run) -> None:
    run(case, schedule="reversed")


@pytest.mark.parametrize(("body", "more"), [(_once, 0), (_twice, 1), (_otherwise, 1)])
def test_a_law_of_the_same_space_is_given_what_another_asked_for_but_nothing_twice(
    body: Callable[[TrainingCase, Run], None], more: int
) -> None:
    engine = FakeEngine()
    run = Run(engine, "fully_shard")
    first = check_law(a_law(_once), run)
    asked = len(engine.requests)
    second = check_law(a_law(body, name="other.law"), run)
    assert first.cases == second.cases == asked >= 10
    assert len(engine.requests) == asked * (1 + more)
    assert first.census == second.census


def test_what_is_observed_otherwise_or_on_another_engine_is_run() -> None:
    engine = FakeEngine()
    run = Run(engine, "fully_shard")
    asked = check_law(a_law(_once), run).cases
    check_law(a_law(_once, observe=frozenset({"grads"})), run)
    assert len(engine.requests) == 2 * asked
    real = FakeEngine()
    real.name = real.kind = "processes"
    there = run.on(real)
    for _ in range(2):
        check_law(a_law(_once), there)
    assert len(real.requests) == 2 * asked


class Changing(FakeEngine):
    """Shows something else in the first run of each case."""

    def run(self, request: RunRequest) -> Execution:
        known = any(request.case == other.case for other in self.requests)
        return replace(super().run(request), voids=("again",) if known else ())


@pytest.mark.nightly
def test_what_broke_a_law_by_a_shared_execution_is_judged_again_by_a_new_one() -> None:
    """An implementation that is right in later runs alone is not accused of what another law has seen."""

    def later(case: TrainingCase, run: Run) -> None:
        if run(case).voids != ("again",):
            raise Violation("it is a first run", got="1", wanted="2", where="here")

    run = Run(Changing(), "fully_shard")
    check_law(a_law(_once), run)
    assert check_law(a_law(later), run).status == "holds"
    assert check_law(a_law(later), Run(Changing(), "fully_shard")).status != "holds"


def test_failures_are_not_kept() -> None:
    engine = FakeEngine(Failure("raised", "it raised"))
    run = Run(engine, "fully_shard")
    asked = check_law(a_law(_once), run).cases
    check_law(a_law(_once), run)
    assert len(engine.requests) == 2 * asked


def test_only_the_newest_are_kept() -> None:
    kept, execution = Executions(), object()
    for key in range(_KEPT + 1):
        kept.keep(key, execution)  # type: ignore[arg-type]
    assert (kept.recall(0), kept.recall(_KEPT), kept.recalled) == (None, execution, 1)
    assert kept.recall(_KEPT) is None
    kept.begin()
    assert (kept.recall(_KEPT), kept.recalled) == (execution, 1)
    kept.begin()
    kept.forget()
    assert kept.recall(_KEPT) is None


def test_spaces_that_draw_otherwise_have_other_names() -> None:
    spaces = {law.space.drawn for law in chapters().values()}
    assert len({space.key for space in spaces}) == len(spaces) > 50
