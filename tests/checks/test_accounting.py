"""Accounts: what an accountant is told is compared with what ran; what is public, with that of one record less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, SamplerCase, StepSpec, TrainingCase
from fsdpcheck.case.sampler import SamplingSpec
from fsdpcheck.checks.accounting import Entry, assert_accounted, assert_same_public
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.violation import Violation
from fsdpcheck.impl.accounting import Draws, Ledger, Plan
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.program.samplers import ENGINE

CASE = TrainingCase(
    ModelSpec((LayerSpec(2),)),
    MeshSpec(2),
    step=StepSpec(steps=2, micro_batches=3, clipping="probe", noise_multiplier=1.5),
)
DRAWS = SamplerCase(SamplingSpec("poisson", records=8, steps=3, rate=0.25), MeshSpec(2))
RATE = 0.125


def told(*steps: list[Entry], resumed: str = "") -> Execution:
    ranks = [RankResult(rank, {}, [StepRecord({}, accounted=list(own)) for own in steps]) for rank in range(2)]
    return Execution("made up", RunRequest(CASE, "x", rate=RATE, load_from=resumed), ranks)


def test_each_step_is_told_once_in_one_entry_or_several() -> None:
    assert_accounted(told([(1.5, RATE, 1)], [(1.5, RATE, 2)]))
    assert_accounted(told([(1.5, RATE, 1), (1.5, RATE, 0)], [(1.5, RATE, 1), (1.5, RATE, 1)]))


@pytest.mark.parametrize(
    ("second", "resumed", "cause"),
    [
        ([(1.5, RATE, 1)], "folder", "does not come back"),
        ([(1.5, RATE, 1)], "", ""),
        ([(1.5, RATE, 6)], "", "micro-batches are counted"),
        ([(1.5, RATE / 2, 2)], "", "divided by the number of ranks"),
        ([(1.5, RATE * 3, 2)], "", "multiplied by the number of micro-batches"),
        ([(1.0, RATE, 2)], "", "another noise multiplier"),
        ([], "", ""),
    ],
)
def test_what_did_not_run_is_found(second: list[Entry], resumed: str, cause: str) -> None:
    with pytest.raises(Violation, match="told what did not run") as caught:
        assert_accounted(told([(1.5, RATE, 1)], second, resumed=resumed))
    assert caught.value.where == "after step 1, rank 0"
    assert cause in caught.value.cause
    assert bool(cause) == bool(caught.value.cause)


def public(records: int, **changes: float) -> Execution:
    seen = {"divisor": 2.0, "steps": 3, "rate": 0.25, "learning_rate": 0.5, **changes}
    ranks = [RankResult(rank, observations=[(ENGINE, "built", 0, dict(seen))]) for rank in range(2)]
    return Execution("made up", RunRequest(DRAWS, "x", records=records), ranks)


def test_what_is_public_is_compared_by_name_and_on_every_rank() -> None:
    assert_same_public(public(8), public(7))
    with pytest.raises(Violation, match="size of its data set") as caught:
        assert_same_public(public(8), public(7, divisor=1.75))
    assert caught.value.got == "divisor = 1.75 with 7 records"
    assert caught.value.cause.startswith("divisor follows from the size")
    with pytest.raises(Violation, match="size of its data set"):
        assert_same_public(public(8), public(7, epochs=1))
    other = public(7)
    other.ranks[1].observations[0][3]["steps"] = 4
    with pytest.raises(Violation) as caught:
        assert_same_public(public(8), other)
    assert caught.value.where == "rank 1"


def test_the_ledger_puts_steps_together_and_goes_through_a_checkpoint() -> None:
    ledger, other = Ledger(), Ledger()
    for multiplier in (1.0, 1.0, 2.0):
        ledger.add(multiplier, RATE)
    assert ledger.entries == [(1.0, RATE, 2), (2.0, RATE, 1)]
    other.load_state_dict(ledger.state_dict())
    other.add(2.0, RATE)
    assert other.entries == [(1.0, RATE, 2), (2.0, RATE, 2)]


def test_draws_of_a_smaller_data_set_are_the_others_without_the_missing_record() -> None:
    plan = Plan(size=40, rate=0.5, steps=4, capacity=4, learning_rate=1.0)
    whole, less = (Draws(plan, records, gaussian.seeded(3)) for records in (40, 39))
    met = 0
    for step in range(4):
        one, other = whole.draw(step), less.draw(step)
        assert len(one) == len(other)
        flat = [[record for chunk in draw for record in chunk] for draw in (one, other)]
        assert [record for record in flat[0] if record != 39] == flat[1]
        met += 39 in flat[0]
    assert met
    assert plan.normaliser == 20
    with pytest.raises(ValueError, match="41 records"):
        Draws(plan, 41, gaussian.seeded(3))
    assert replace(plan, size=41).normaliser == 20.5
