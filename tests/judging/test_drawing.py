"""Cases that are drawn for a law: all before any is judged, more than are; one that breaks it is made smaller."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from fsdpcheck.case import Case, from_json
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import INTERNAL, NotExact
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.coverage import Limits
from fsdpcheck.judging.drawing import Batch, Drawings
from fsdpcheck.judging.exploration import Exploration
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import Tally
from fsdpcheck.strategies import enumeration
from tests.common.laws_by_hand import FakeEngine, a_case, a_law

CASES = st.builds(a_case, st.integers(1, 4), st.integers(1, 8), st.integers(0, 100))


@pytest.fixture
def run() -> Run:
    return Run(FakeEngine(), "fully_shard")


def test_a_batch_is_drawn_once_and_each_of_its_cases_can_be_drawn_again() -> None:
    batch = Batch(CASES, 20, 3, 20)
    for case in dict.fromkeys(batch.draw().cases):
        met: list[Case] = []
        batch.shrink(case, met.append)
        assert met == [case], "which did not raise, so nothing is smaller"
    assert batch.draw().cases != Batch(CASES, 20, 4, 20).draw().cases
    drawings = Drawings()
    assert drawings.of("key", batch) is drawings.of("key", Batch(CASES, 20, 4, 20))
    assert not batch.draw().all_there_are
    assert Batch(st.sampled_from([a_case(1, 1), a_case(1, 2)]), 20, 3, 20).draw().all_there_are
    assert Batch(CASES.filter(lambda case: False), 5, 3, 5).draw().cases == ()


@pytest.mark.parametrize("profile", ["quick", "ci"])
def test_as_many_distinct_cases_are_judged_as_the_profile_says(run: Run, profile: str) -> None:
    judged = Counter[Case]()
    verdict = check_law(a_law(lambda case, run: judged.update([case])), run, profile)
    assert verdict.cases == len(judged) == PROFILES[profile]
    assert set(judged.values()) == {1}


def test_cases_that_cannot_be_judged_are_replaced(run: Run) -> None:
    def body(case: Case, run: Run) -> None:
        if case.seed % 30:
            raise NotExact("most cases")

    verdict = check_law(a_law(body), run)
    assert (verdict.status, verdict.cases) == ("holds", PROFILES["quick"])
    assert verdict.rejected > 60


def test_what_breaks_the_law_is_made_smaller_and_what_was_drawn_before_it_is_not_judged_again(run: Run) -> None:
    judged: list[Case] = []

    def body(case: Case, run: Run) -> None:
        judged.append(case)
        if case.layout.batch_size >= 4:
            raise Violation("wrong", got="got", wanted="wanted", where="where")

    for shrink, smallest in ((False, False), (True, True)):
        judged.clear()
        finding = check_law(a_law(body), run, shrink=shrink).finding
        assert finding is not None
        first = next(number for number, case in enumerate(judged) if case.layout.batch_size >= 4)
        assert (from_json(json.dumps(finding.case)) == a_case(1, 4)) is smallest
        if not shrink:
            assert len(judged) == first + 1
        assert not set(judged[:first]) & set(judged[first:][: 2 if shrink else 1])


def test_a_case_that_was_drawn_and_not_judged_is_judged_when_it_is_smaller() -> None:
    """Hypothesis draws the smallest case of all first; of a batch that is spread out it is often not judged."""
    batch = Batch(CASES, 60, 3, 5)
    drawn = batch.draw().cases
    smallest = a_case(1, 1)
    assert smallest in enumeration.distinct(CASES, 60, 3)

    def judge(case: Case) -> None:
        raise Violation(str(case.seed), got="got", wanted="wanted", where="where")

    for case in drawn[:5]:
        with pytest.raises(Violation) as raised:
            batch.shrink(case, judge)
        assert raised.value.what == str(smallest.seed) == "0"


def test_a_case_that_holds_when_it_is_judged_again_is_no_counterexample(run: Run) -> None:
    broke: list[Case] = []

    def body(case: Case, run: Run) -> None:
        if not broke:
            broke.append(case)
            raise Violation("wrong", got="got", wanted="wanted", where="where")

    verdict = check_law(a_law(body), run)
    assert verdict.status == "error"
    assert "broke and then held on the same case" in verdict.reason
    assert Flaky.__name__ not in verdict.reason


KILLED_ONCE = """
import os
from dataclasses import replace
from pathlib import Path
from fsdpcheck.adapters.builtin.ddp import adapter as ddp

MARK = Path(__file__).with_suffix(".mark")

class Once:
    name, features = "once", replace(ddp.features, promises=frozenset({"plain"}))

    def build(self, model, setup):
        if setup.rank == 1 and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), 9)
        return ddp.build(model, setup)

adapter = Once()
"""


def test_a_process_that_somebody_kills_once_is_told_with_the_signal(tmp_path: Path, engine: SimulatedEngine) -> None:
    (tmp_path / "once.py").write_text(KILLED_ONCE)
    law = chapters()["training.plain"]
    verdict = check_law(law, Run(engine, f"{tmp_path / 'once.py'}:adapter"), world_sizes=(2,))
    assert (verdict.status, verdict.exit_code) == ("error", INTERNAL)
    assert verdict.reason.startswith(
        "the process of the simulated ranks ended in the middle of a run: it was ended by SIGKILL\n  where   in model: "
    )
    assert "next    look for who ended the process" in verdict.reason


def test_the_answer_of_the_next_case_is_computed_while_ranks_compute(
    engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not after the last: nobody would ask for it. An answer that cannot be had is told where it is asked."""
    judged, prepared = list[Case](), list[Case]()
    monkeypatch.setattr(Run, "prepare", lambda run, case: prepared.append(case))

    def body(case: Case, run: Run) -> None:
        judged.append(case)
        run(case)

    law = replace(chapters()["training.plain"], body=body)
    assert check_law(law, Run(engine, "reference"), world_sizes=(2,), most=3).status == "holds"
    assert prepared == judged[1:3]
    monkeypatch.undo()
    Run(engine, "no such adapter").prepare(judged[0])


def test_an_interrupt_while_ranks_compute_takes_their_answer_from_nobody(engine: SimulatedEngine) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    run, before, after = Run(engine, "reference"), a_case(2, 4), a_case(2, 2)
    expected = run(after)
    engine.meanwhile = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(before)
    found = run(after)
    assert found.request == expected.request
    for rank, wanted in zip(found.ranks, expected.ranks, strict=True):
        for name, value in wanted.steps[-1].params.items():
            assert torch.equal(rank.steps[-1].params[name], value)


def test_cases_that_were_drawn_for_one_implementation_are_not_judged_on_another(engine: SimulatedEngine) -> None:
    """A session judges all its adapters by copies of one run."""
    law, first = chapters()["training.plain"], Run(engine, "fully_shard")
    drawn: dict[str, list[Case]] = {"fully_shard": [], "ddp": []}
    for adapter, cases in drawn.items():
        check_law(
            law, replace(first, adapter_ref=adapter), on_case=lambda law, run, case, to=cases: to.append(case), most=2
        )
    features = engine.declared("ddp").features
    assert all(case.requires() <= features.accepts for case in drawn["ddp"])
    assert drawn["ddp"] != drawn["fully_shard"]


def test_a_choice_of_six_for_each_case_is_drawn_and_of_sixty_where_many_are_judged(engine: SimulatedEngine) -> None:
    law = chapters()["training.plain"]
    for most, size in ((1, 6), (2, 12), (11, 60), (61, 61)):
        exploration = Exploration(law, Run(engine, "ddp"), Tally(Limits(frozenset(), (2,))), (2,))
        batch, cases = next(exploration._batches(most, ""))
        assert (batch.count, len(cases), batch.spread_over) == (size, size, most)
