"""Further cases decide between causes, say which kind of case fails, and never change a verdict."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.diagnosis import of_failure
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import Execution, Failure, RankResult, RankState, RunRequest
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.cause import DID_NOT_MOVE, OF_UPDATES, PATTERN, WEAK, Cause, common, named
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.findings.violation import Violation
from fsdpcheck.impl import faults
from fsdpcheck.judging import coverage
from fsdpcheck.judging.attribution import Evidence
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.exploration import Exploration
from fsdpcheck.judging.first_wrong import FirstWrong
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import Tally
from fsdpcheck.strategies import enumeration

W, K, LEFT = Cause("W", "W = 2"), Cause("K", "K = 2"), Cause("left", "sample 0 is left out")
SOMEWHERE, SINGLE = Cause("where", "only biases", PATTERN), Cause("single", "one is off", WEAK)


def test_one_or_two_causes_are_named_and_the_strongest_alone() -> None:
    assert named([W]) == "W = 2"
    assert named([W, K]) == "W = 2 or K = 2"
    assert named([W, K, LEFT]) == named(None) == named([]) == named([SINGLE]) == ""
    assert named([SOMEWHERE, W, W]) == "W = 2"
    assert named([SOMEWHERE]) == "only biases"


def test_a_cause_has_to_fit_every_case_that_can_tell() -> None:
    assert common([W, K, LEFT], [[W, LEFT], [W, K], None]) == [W]
    assert common([W, K], [[K], [W], [W]]) == []
    assert common([W], [[], [], []]) == []
    assert common(None, [None]) == []
    assert common([W, SOMEWHERE], [[W], [SOMEWHERE]]) == [W], "where values stand says nothing against a computation"


def test_one_case_in_five_may_speak_against_a_cause() -> None:
    assert common([W, K], [[W], [W, K], [W], [W], [K]]) == [W]
    assert common([W, K], [[W], [W, K], [W], [K], [K]]) == []


def test_what_fits_for_want_of_samples_needs_a_case_that_has_them() -> None:
    assert named(common([SINGLE], [[SINGLE], [SINGLE]])) == ""
    assert named(common([SINGLE], [[SINGLE], [SINGLE._replace(strength=0)]])) == "one is off"


def test_a_kind_of_case_that_alone_fails_is_said_with_counts() -> None:
    assert (
        Evidence(drawn=_drawn(failing=9, passing=21)).when()
        == "only cases with bias fail: 9 of them; none of 21 others does"
    )
    assert Evidence(drawn=_drawn(failing=2, passing=3)).when() == "", "chance alone does that"
    spoiled = _drawn(failing=9, passing=21)
    spoiled[next(case for case in spoiled if not case.model.layers[0].bias)] = True
    assert Evidence(drawn=spoiled).when() == ""


def test_that_a_parameter_did_not_move_is_no_cause_of_what_was_wrong_before() -> None:
    causes, other = [Cause(DID_NOT_MOVE, "the weight did not move", PATTERN)], Cause("bias", "the bias is left out")
    for first in ("", "updated"):
        assert Evidence().cause(causes, FirstWrong(quantity=first)) == "the weight did not move"
    for first in ("gradient", "initial parameters", "norms"):
        assert Evidence().cause(causes, FirstWrong(quantity=first)) == ""
        assert Evidence().cause([*causes, other], FirstWrong(quantity=first)) == "the bias is left out"
    missing = FirstWrong(quantity="gradient", missing=True)
    assert Evidence().cause(causes, missing) == "the weight did not move, for there is no gradient"
    assert Evidence().cause([*causes, other], missing) == "the bias is left out"
    frozen = "the weight did not move, as if it were frozen as others are, for there is no gradient"
    assert Evidence().cause(causes, missing, freezes=True) == frozen
    assert Evidence().cause(causes, FirstWrong(quantity="updated"), freezes=True) == "the weight did not move"


def test_a_cause_of_the_update_alone_is_none_of_what_was_wrong_before() -> None:
    """A parameter may look rounded because of what it is updated by."""
    causes = [Cause(f"{OF_UPDATES}rounded", "the weight is rounded")]
    assert Evidence().cause(causes, FirstWrong(quantity="updated")) == "the weight is rounded"
    assert Evidence().cause(causes, FirstWrong(quantity="norms")) == ""


@pytest.mark.parametrize(
    "name",
    [
        "summed_not_averaged",
        pytest.param("rank_zero_gathers_for_its_log", marks=pytest.mark.nightly),
        pytest.param("frozen_weight_counted", marks=pytest.mark.nightly),
        pytest.param("factor_off_by_1e_6", marks=pytest.mark.nightly),
    ],
)
def test_the_cause_of_a_planted_fault_is_named(name: str, engine: SimulatedEngine) -> None:
    found = _verdict(name, engine).finding
    assert found is not None
    assert re.search(faults.ALL[name].cause, found.cause), found.cause


@pytest.mark.nightly
def test_evidence_changes_nothing_but_what_is_said(engine: SimulatedEngine) -> None:
    with_evidence, without = (_verdict("complete_norms_summed", engine, shrink=shrink) for shrink in (True, False))
    assert with_evidence.status == without.status == "finding"
    assert with_evidence.finding is not None
    assert with_evidence.finding.stage.startswith("the first to differ, in step 0: the norms on rank ")


@pytest.mark.nightly
def test_evidence_ends_with_the_budget_and_is_not_counted_as_judged(engine: SimulatedEngine) -> None:
    law = chapters()["norms.replicated-complete"]
    run = Run(engine, "reference", installs=("fsdpcheck.impl.faults:complete_norms_summed",)).watching(law.observe)
    failing = next(iter(enumeration.distinct(law.draw(run.features, (2,)), 1)))
    seen = {}
    for deadline in (time.monotonic() - 1, None):
        checking = Exploration(law, run, Tally(coverage.Limits(run.features.accepts, (2,))), (2,))
        with pytest.raises(Violation):
            checking.judge(failing)
        checking.deadline = deadline
        checking.look_further()
        assert checking.broken is not None
        seen[deadline is None] = checking.broken.evidence.drawn, checking.tally.judged
    assert list(seen[False][0]) == [failing]
    assert len(seen[True][0]) > 5
    assert len(seen[True][1]) == 1


def _calls(*ops: str) -> tuple[Collective, ...]:
    return tuple(Collective(op, (0, 1, 2), "world", i, subject="units.0") for i, op in enumerate(ops))


def _failed(traces: list[tuple[Collective, ...]], layout: BatchLayout) -> Execution:
    case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(3), layout)
    ranks = [RankResult(rank, trace=trace) for rank, trace in enumerate(traces)]
    states = tuple(RankState(rank, "blocked", where=f"user.py:{10 + rank}") for rank in range(3))
    return Execution("made up", RunRequest(case, "made up"), ranks, Failure("deadlock", "stuck", states))


def test_the_rank_that_leaves_the_common_calls_is_named() -> None:
    even = BatchLayout("contiguous", 3)
    common_calls = _calls("all_gather", "reduce_scatter")
    alone = named(
        of_failure(_failed([_calls("all_gather", "reduce_scatter", "all_reduce"), common_calls, common_calls], even))
    )
    assert alone.startswith("rank 0 alone calls all_reduce of units.0 at user.py:10 as call 2, where ranks 1, 2 make")
    last = named(of_failure(_failed([common_calls, common_calls, _calls("all_gather", "all_gather")], even)))
    assert last.startswith("the last rank (2) alone calls all_gather")
    long, short = ((replace(_calls("all_gather")[0], inputs=(("float64", (size,)),)),) for size in (3, 2))
    uneven = named(of_failure(_failed([long, long, short], even)))
    assert uneven.startswith("the last rank (2) alone calls all_gather of units.0 at user.py:12 as call 0")
    assert "with [2] in place of [3]: parts of other sizes, which are to be padded, or the same coll" in uneven
    empty = BatchLayout("ragged", 2, counts=(1, 0, 1))
    skipped = named(of_failure(_failed([common_calls, _calls("all_gather", "barrier"), common_calls], empty)))
    assert "rank 1, without a sample, calls barrier" in skipped
    assert of_failure(_failed([common_calls] * 3, even)) is None
    raised = replace(_failed([common_calls] * 3, even), failure=Failure("raised", "no"))
    assert of_failure(raised) is None


def test_what_singles_out_a_rank_is_asked_of_its_group_alone() -> None:
    mesh = MeshSpec(2, dp_replicate=2)
    case = TrainingCase(ModelSpec((LayerSpec(1),)), mesh, BatchLayout("contiguous", 1))
    skipped = [Collective(op, (0, 1), "shard", 0, subject="(root)") for op in ("reduce_scatter", "all_gather")]
    ranks = [RankResult(rank, trace=(call,)) for rank, call in enumerate(skipped)]
    failed = Execution("made up", RunRequest(case, "made up"), ranks, Failure("deadlock", "stuck", ()))
    keys = {cause.key for cause in of_failure(failed) or ()}
    assert {"rank without gradient", "the last rank alone", "rank without samples"} <= keys


def _drawn(failing: int, passing: int) -> dict[TrainingCase, bool]:
    """Cases with a bias that fail, and others without one that hold, in different seeds and batch sizes."""
    biased = {
        TrainingCase(ModelSpec((LayerSpec(1, bias=True),)), layout=BatchLayout(batch_size=1 + i % 3), seed=i): True
        for i in range(failing)
    }
    return biased | {
        TrainingCase(ModelSpec((LayerSpec(1),)), layout=BatchLayout(batch_size=1 + i % 3), seed=i): False
        for i in range(passing)
    }


def _verdict(name: str, engine: SimulatedEngine, shrink: bool = True) -> Verdict:
    """That of the first law that has to catch a fault."""
    law = chapters()[faults.ALL[name].caught_by]
    return check_law(law, Run(engine, "reference", installs=(f"fsdpcheck.impl.faults:{name}",)), shrink=shrink)
