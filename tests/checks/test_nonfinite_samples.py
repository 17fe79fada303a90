"""A sample without a norm: refused by every rank by name, or left out; anything else is a violation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdpcheck import strategies
from fsdpcheck.adapters.builtin.reference import Reference
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.nonfinite_samples import assert_refused_or_left_out, spoiled
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution, Failure, RankResult, RankState, Refused, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program import nonfinite_samples
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import batches

CASE = TrainingCase(
    ModelSpec((LayerSpec(2, activation="relu"), LayerSpec(2)), features=2, units=(1,)),
    MeshSpec(2),
    BatchLayout("ragged", 5, counts=(4, 1)),
    StepSpec(clipping="unclipped"),
    seed=1,
)
PAIR = spoiled(CASE)


def executed(engine: SimulatedEngine, adapter: str) -> tuple[Execution, Run]:
    run = Run(engine, adapter)
    given = ((PAIR.sample, PAIR.value),)
    return run(PAIR.case, observe={"grads"}, spoiled=given, given_for=PAIR.without), run


def failed(*said: str) -> Execution:
    ranks = tuple(RankState(rank, "raised", stack=("  file:3 in step", text)) for rank, text in enumerate(said))
    untouched = Refused([torch.ones(2)], [torch.ones(2)])
    results = [RankResult(rank, refused=untouched) for rank in range(2)]
    return Execution("fabricated", RunRequest(PAIR.case, "reference"), results, Failure("raised", "a report", ranks))


def test_the_spoiled_sample_is_in_one_case_and_not_in_the_other() -> None:
    values = set()
    for case in enumeration.distinct(strategies.cases_of(strategies.PRIVATE_UNCLIPPED, Reference.features), 20):
        pair = spoiled(case)
        assert pair.sample in batches.logical_batch(pair.case, 0)
        rest = batches.logical_batch(pair.case, 0)
        del rest[pair.sample]
        assert batches.logical_batch(pair.without, 0) == rest
        values.add(str(pair.value))
    assert values == {"nan", "inf", "-inf"}


def test_a_batch_of_nobody_has_nobody_to_spoil() -> None:
    with pytest.raises(NotExact, match="no sample"):
        spoiled(replace(CASE, layout=BatchLayout("listed", 5, lists=((), ()))))


def test_targets_of_the_sample_are_spoiled_and_no_others() -> None:
    request = RunRequest(CASE, "reference", spoiled=((2, math.inf),))
    (micro,) = nonfinite_samples.batch_of(batches.batch(CASE, 0, 0), request).micro_batches
    assert bool((micro.targets[2] == math.inf).all())
    assert bool(micro.targets[[0, 1, 3]].isfinite().all())
    classes = replace(CASE, step=replace(CASE.step, loss="cross_entropy"))
    (micro,) = nonfinite_samples.batch_of(batches.batch(classes, 0, 0), replace(request, case=classes)).micro_batches
    assert micro.targets[2].isinf().tolist() == [False, False, True, True, True, True]


@pytest.mark.parametrize("adapter", ["reference", "reference:dropping", "reference_fsdp2"])
def test_refusing_and_dropping_pass(engine: SimulatedEngine, adapter: str) -> None:
    execution, run = executed(engine, adapter)
    assert (execution.failure is None) == (adapter == "reference:dropping")
    assert_refused_or_left_out(execution, PAIR, run.answer(PAIR.without))


def test_a_sample_that_came_through_is_a_violation(engine: SimulatedEngine) -> None:
    execution, run = executed(engine, "reference:dropping")
    grads = execution.ranks[1].steps[0].grads
    assert grads is not None
    grads["tail.linear1.weight"][0, 1] = torch.nan
    with pytest.raises(Violation, match="neither refused by all ranks nor left out") as caught:
        assert_refused_or_left_out(execution, PAIR, run.answer(PAIR.without))
    assert "step 0, rank 1, gradients" in caught.value.where
    assert "0 * NaN" in caught.value.cause


def test_every_rank_has_to_name_it(engine: SimulatedEngine) -> None:
    answer = Run(engine, "reference").answer(PAIR.without)
    named = f"ValueError: sample {PAIR.sample} has no norm"
    assert_refused_or_left_out(failed(named, named), PAIR, answer)
    for said in ("Aborted", f"ValueError: 1{PAIR.sample} samples have no norm"):
        with pytest.raises(Violation, match="not every rank refuses") as caught:
            assert_refused_or_left_out(failed(named, said), PAIR, answer)
        assert caught.value.where.startswith("step 0, rank 1; sample")
    with pytest.raises(UsageError, match=r"nothing of ranks \[1\]"):
        assert_refused_or_left_out(failed(named), PAIR, answer)


def test_what_was_refused_has_changed_no_parameter_of_any_rank(engine: SimulatedEngine) -> None:
    answer = Run(engine, "reference").answer(PAIR.without)
    named = f"ValueError: sample {PAIR.sample} has no norm"
    execution = failed(named, named)
    execution.ranks[1].refused = Refused([torch.ones(2)], [torch.tensor([1.0, torch.nan])])
    with pytest.raises(Violation, match="a step that is refused changes parameters") as caught:
        assert_refused_or_left_out(execution, PAIR, answer)
    assert "rank 1" in caught.value.where
    assert "tensor 0 of those that its optimizer updates, element [1]" in caught.value.where
    assert caught.value.despite
    execution.ranks[1].refused = None
    with pytest.raises(UsageError, match="what rank 1 trains"):
        assert_refused_or_left_out(execution, PAIR, answer)
    del execution.ranks[1]
    with pytest.raises(UsageError, match=r"nothing of ranks \[1\]"):
        assert_refused_or_left_out(execution, PAIR, answer)


@pytest.mark.parametrize("adapter", ["reference", "reference_fsdp2"])
def test_what_is_noted_of_a_refusal_is_all_that_ranks_train(engine: SimulatedEngine, adapter: str) -> None:
    execution, run = executed(engine, adapter)
    noted = [result.refused for result in execution.ranks if result.refused is not None]
    assert len(noted) == 2
    trained = sum(value.numel() for value in run.answer(PAIR.without).steps[0].used.values())
    padding = 0 if adapter == "reference_fsdp2" else 1
    assert trained <= sum(tensor.numel() for one in noted for tensor in one.after) <= trained + 2 * padding


def test_a_deadlock_is_no_refusal(engine: SimulatedEngine) -> None:
    execution = failed("", "")
    execution.failure = Failure("deadlock", "rank 1 never came", (RankState(0, "blocked"), RankState(1, "finished")))
    with pytest.raises(Violation, match="did not complete"):
        assert_refused_or_left_out(execution, PAIR, Run(engine, "reference").answer(PAIR.without))
