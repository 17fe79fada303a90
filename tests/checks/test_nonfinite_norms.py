"""The global norm of a gradient that is not finite: all ranks return that it is not, or all raise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdpcheck import strategies
from fsdpcheck.adapters.builtin.reference import Reference
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.nonfinite_norms import assert_norm_not_finite
from fsdpcheck.checks.nonfinite_samples import overflowing
from fsdpcheck.diagnosis import global_norm
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, Failure, RankResult, RankState, RunRequest, StepRecord
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program import nonfinite_samples
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import batches

CASE = TrainingCase(
    ModelSpec((LayerSpec(2, activation="relu"), LayerSpec(2)), features=2, units=(1,)),
    MeshSpec(2),
    BatchLayout("contiguous", 4),
    StepSpec(max_grad_norm=1.0, normaliser=4),
    seed=1,
)
ONE, SPOILED = overflowing(CASE)


def shown(*norms: float, parameters: tuple[float, ...] = (1.0, 1.0), failure: Failure | None = None) -> Execution:
    ranks = []
    for rank, (norm, parameter) in enumerate(zip(norms, parameters, strict=True)):
        record = StepRecord({"weight": torch.tensor([parameter])}, grad_norm=torch.tensor(norm))
        ranks.append(RankResult(rank, steps=[record]))
    return Execution("made up", RunRequest(ONE, "made up", spoiled=(SPOILED,)), ranks, failure)


def raised(*said: str) -> Failure:
    states = (RankState(k, "raised" if text else "blocked", stack=("  file:3", text)) for k, text in enumerate(said))
    return Failure("raised", "a report", tuple(states))


def completes() -> Execution:
    return shown(1.0, 1.0)


def test_one_sample_of_the_step_is_chosen() -> None:
    values = set()
    for case in enumeration.distinct(strategies.cases_of(strategies.GLOBAL_NORM, Reference.features), 20):
        one, (sample, value) = overflowing(case)
        assert sample in batches.logical_batch(one, 0)
        assert one.step.steps == 1
        values.add(str(value))
    assert values == {"nan", "inf", "-inf"}
    with pytest.raises(NotExact, match="no sample"):
        overflowing(replace(CASE, layout=BatchLayout("listed", 4, lists=((), ()))))


def test_one_target_of_the_instrument_is_spoiled() -> None:
    places = set()
    for seed in range(20):
        case = replace(CASE, seed=seed)
        request = RunRequest(case, "reference", spoiled=((1, math.inf),))
        (micro,) = nonfinite_samples.batch_of(batches.batch(case, 0, 0), request).micro_batches
        ((row, place),) = micro.targets.isfinite().logical_not().nonzero().tolist()
        assert row == 1
        places.add(place)
    assert places == {2, 3, 4, 5}


@pytest.mark.parametrize("adapter", ["reference", "fully_shard", "ddp"])
def test_the_element_reaches_the_norm_of_every_rank(engine: SimulatedEngine, adapter: str) -> None:
    run = Run(engine, adapter)
    execution = run(ONE, observe={"grad_norm"}, spoiled=(SPOILED,))
    assert_norm_not_finite(execution, lambda: run(ONE))
    assert not any(bool(result.steps[0].grad_norm.isfinite()) for result in execution.ranks)  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_what_is_the_norm_of_no_gradient_passes(norm: float) -> None:
    assert_norm_not_finite(shown(norm, norm, parameters=(math.nan, math.nan)), completes)


def test_a_number_is_a_violation_and_says_whether_all_ranks_return_one() -> None:
    with pytest.raises(Violation, match="not finite is a number") as caught:
        assert_norm_not_finite(shown(2.0, 2.0), completes)
    assert caught.value.cause == "what is not finite is left out of the norm"
    with pytest.raises(Violation, match="not finite is a number") as caught:
        assert_norm_not_finite(shown(math.inf, 2.0), completes)
    assert "the sum does not reach it" in caught.value.cause
    assert caught.value.where.startswith("step 0, rank 1")


@pytest.mark.parametrize(
    ("fault", "said"),
    [("own_norm_reported", global_norm.OWN_SHARD.text), ("without_fault", "the sum does not reach it")],
)
def test_norms_of_shards_without_the_element_say_that_they_are_not_summed(
    fault: str, said: str, engine: SimulatedEngine
) -> None:
    installs = () if fault == "without_fault" else (f"fsdpcheck.impl.faults:{fault}",)
    run = Run(engine, "reference", installs=installs)
    without, answer = lambda: run(ONE, observe={"grad_norm"}), lambda: run.answer(ONE)
    with pytest.raises(Violation, match="not finite is a number") as caught:
        assert_norm_not_finite(shown(math.inf, 2.0), without, answer)
    assert said in caught.value.cause


def test_ranks_that_differ_are_a_violation() -> None:
    for execution in (shown(math.inf, math.nan), shown(math.nan, math.nan, parameters=(1.0, math.nan))):
        with pytest.raises(Violation, match="the ranks do not agree"):
            assert_norm_not_finite(execution, completes)


def test_all_ranks_may_raise_what_they_do_not_raise_without_the_element() -> None:
    failure = raised("RuntimeError: norm of 2 tensors", "RuntimeError: norm of 3 tensors")
    assert_norm_not_finite(shown(0.0, 0.0, failure=failure), completes)
    with pytest.raises(Violation, match="did not complete"):
        assert_norm_not_finite(shown(0.0, 0.0, failure=failure), lambda: shown(0.0, 0.0, failure=failure))
    for said in (("RuntimeError: a norm", ""), ("RuntimeError: a norm", "IndexError: a place"), ("RuntimeError: a",)):
        with pytest.raises(Violation, match="did not complete") as caught:
            assert_norm_not_finite(shown(0.0, 0.0, failure=raised(*said)), completes)
        assert "without it all finish" in caught.value.cause


def test_a_rank_whose_peers_have_left_does_not_refuse() -> None:
    """On real ranks a lost connection is a RuntimeError too, raised in a collective."""
    one, other = raised("RuntimeError: a norm", "RuntimeError: connection closed by peer").ranks
    elsewhere = replace(other, stack=("  file:3", "  collectives.py:9", other.stack[-1]))
    failure = Failure("raised", "a report", (one, elsewhere))
    with pytest.raises(Violation, match="did not complete"):
        assert_norm_not_finite(shown(0.0, 0.0, failure=failure), completes)
