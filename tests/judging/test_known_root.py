"""Judging goes on behind a finding: cases that fail like it are set aside, and other roots are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import StepSpec, TrainingCase
from fsdpcheck.errors import AdapterError
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import coverage
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.exploration import Exploration, Stop
from fsdpcheck.judging.known_root import seen
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import Tally
from fsdpcheck.strategies import BuiltSpace
from tests.common.laws_by_hand import FakeEngine, a_case, a_law


def draw(features: Features, world_sizes: tuple[int, ...]) -> st.SearchStrategy[TrainingCase]:
    return st.builds(_case, st.sampled_from(world_sizes), st.integers(1, 3), st.integers(1, 3), st.booleans())


def _case(world: int, steps: int, micro_batches: int, other: bool) -> TrainingCase:
    step = StepSpec(steps=steps, micro_batches=micro_batches, normaliser=world)
    return replace(a_case(world, 12), step=step, seed=int(other))


LAW = {"space": BuiltSpace(build=draw)}


def broken(what: str) -> Violation:
    return Violation(what, got="1", wanted="2", where="here")


def of_several_steps(case: TrainingCase, run: Run) -> None:
    if case.step.micro_batches > 1:
        raise broken("it is wrong")
    if case.step.steps > 1:
        raise broken("it is wrong")


@pytest.fixture
def run() -> Run:
    return Run(FakeEngine(), "fully_shard")


def test_two_roots_that_the_law_says_the_same_of_are_two_findings(run: Run) -> None:
    alone = check_law(a_law(of_several_steps, **LAW), run, most=40)
    assert (len(alone.findings), alone.findings[0].alike) == (1, 0)
    verdict = check_law(a_law(of_several_steps, **LAW), run, most=40, roots=8)
    assert {one.holds_with for one in verdict.findings} == {("one step",), ("one micro-batch",)}
    assert (verdict.status, verdict.exit_code) == ("finding", 1)
    assert all(one.alike > 5 for one in verdict.findings)
    assert sum(one.alike + 1 for one in verdict.findings) < verdict.cases
    smallest = [decode(one.token).case for one in verdict.findings]
    assert {(case.world_size, case.step.steps > 1, case.step.micro_batches) for case in smallest} == {
        (1, False, 2),
        (1, True, 1),
    }, "each is made smaller, and stays what it is"


def of_rare_steps(case: TrainingCase, run: Run) -> None:
    """Most cases break it by their micro-batches; of the others, those of three steps."""
    judged.append(case)
    if case.step.micro_batches > 1 or case.step.steps > 2:
        raise broken("it is wrong")


judged: list[TrainingCase] = []


def test_cases_that_may_fail_like_what_is_told_are_judged_last(run: Run) -> None:
    """Of few cases that are judged, none is spent on what is told while another is there."""
    judged.clear()
    verdict = check_law(a_law(of_rare_steps, **LAW), run, most=6, roots=8)
    assert {one.holds_with for one in verdict.findings} == {("one micro-batch",), ("one step",)}


def of_all_but_the_plainest(case: TrainingCase, run: Run) -> None:
    judged.append(case)
    if case.world_size * case.step.steps * case.step.micro_batches > 1:
        raise broken("it is wrong")


def test_cases_that_shrinking_visits_are_not_counted_as_judged_behind(run: Run) -> None:
    """Else nothing would be judged behind a finding whose shrinking visits as many as were asked for."""
    judged.clear()
    law, tally = a_law(of_all_but_the_plainest, **LAW), Tally(coverage.Limits(None, (1, 2)), 1)
    exploration = Exploration(law, run, tally, (1, 2))
    assert exploration.explore(4) is None
    assert exploration.broken is not None
    holding = [case.world_size * case.step.steps * case.step.micro_batches == 1 for case in judged]
    drawn = holding.index(False)
    assert any(holding[drawn:]), "shrinking has visited what holds"
    assert tally.passed == drawn


def always(case: TrainingCase, run: Run) -> None:
    raise broken("it is wrong")


def test_a_law_that_each_case_breaks_has_one_finding(run: Run) -> None:
    verdict = check_law(a_law(always, **LAW), run, most=40, roots=8)
    assert len(verdict.findings) == 1
    assert verdict.findings[0].alike == verdict.cases - 1


def of_each_number(case: TrainingCase, run: Run) -> None:
    raise broken(f"{case.world_size} ranks")


def test_no_more_findings_than_are_asked_for(run: Run) -> None:
    """Each number of ranks breaks it in other words: five roots."""
    verdict = check_law(a_law(of_each_number, **LAW), run, most=40, roots=3)
    assert len({one.what for one in verdict.findings}) == len(verdict.findings) == 3


def ends_behind(case: TrainingCase, run: Run) -> None:
    if case.step.micro_batches > 1:
        raise broken("it is wrong")
    if case.step.steps > 2:
        raise AdapterError("it cannot")


def test_an_error_in_a_case_behind_a_finding_is_told_and_takes_nothing_from_it(run: Run) -> None:
    verdict = check_law(a_law(ends_behind, **LAW), run, most=40, roots=8)
    assert len(verdict.findings) == 1
    assert "an error ended the judging of other cases: it cannot" in verdict.findings[0].note
    assert verdict.exit_code == 2, "it is worse than a finding"


def test_a_finding_behind_another_outlives_the_budget_that_ends_its_shrinking(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    explore = Exploration.explore

    def ended(self: Exploration, most: int) -> BaseException | None:
        stop = explore(self, most)
        return Stop(None, None) if self.known and self.broken is not None else stop

    monkeypatch.setattr(Exploration, "explore", ended)
    verdict = check_law(a_law(of_several_steps, **LAW), run, most=40, roots=8)
    assert len(verdict.findings) == 2
    assert "the budget ended the shrinking" in verdict.findings[1].note


def test_failures_at_one_line_are_one_root() -> None:
    engine = FakeEngine()
    run = Run(engine, "fully_shard")

    def fails(case: TrainingCase, run: Run) -> None:
        line = "a.py:1" if case.step.micro_batches > 1 else "a.py:2" if case.step.steps > 1 else ""
        engine.failure = Failure("raised", line, (RankState(0, "raised", where=line),)) if line else None
        if run(case).failure is not None:
            raise broken("the run did not complete")

    verdict = check_law(a_law(fails, **LAW), run, most=40, roots=8)
    assert sorted(one.place for one in verdict.findings) == ["a.py:1", "a.py:2"]
    assert {one.kind for one in verdict.findings} == {"raised"}


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ((("blocked", "train.py:20"), ("blocked", "train.py:9")), "train.py:9"),
        ((("blocked", "train.py:9"), ("blocked", "train.py:20")), "train.py:9"),
        ((("blocked", "train.py:9"), ("raised", "train.py:20")), "train.py:20"),
        ((("finished", ""), ("finished", "")), ""),
    ],
)
def test_whichever_rank_stands_where_the_place_is_one(ranks: tuple[tuple[str, str], ...], place: str) -> None:
    states = tuple(RankState(rank, state, where=where) for rank, (state, where) in enumerate(ranks))
    run = Run(FakeEngine(Failure("mismatch", "", states)), "reference")
    run(a_case(2, 12))
    assert seen(run, broken("the run did not complete")) == ("mismatch", place)
