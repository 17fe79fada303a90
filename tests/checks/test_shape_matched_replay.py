"""Shape-matched replay: the theorem's bound, parameters laid out as they were, and reports that cannot be replayed."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks import shape_matched_replay
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run

REAL = TrainingCase(
    ModelSpec((LayerSpec(5, bias=True, activation="gelu"), LayerSpec(3)), features=3, units=(1,)),
    MeshSpec(3),
    BatchLayout("ragged", 5, counts=(3, 0, 2)),
    StepSpec(steps=2, normaliser=3),
    Arithmetic(project=False, numbers="real"),
)


def executed(engine: SimulatedEngine, case: TrainingCase = REAL, adapter: str = "reference") -> Execution:
    seen = {"grads", "factors"} if case.step.private else {"grads"}
    execution = Run(engine, adapter)(case, observe=seen)  # type: ignore[arg-type]
    assert execution.failure is None
    return execution


@pytest.mark.parametrize("adapter", ["reference", "fully_shard", "fsdp1"])
def test_real_numbers_are_accepted_where_they_round(engine: SimulatedEngine, adapter: str) -> None:
    execution = executed(engine, adapter=adapter)
    shape_matched_replay.assert_gradients_sum(execution)
    shape_matched_replay.assert_updates_follow(execution)


def test_an_error_above_the_bound_is_found_and_one_unit_in_the_last_place_is_not(engine: SimulatedEngine) -> None:
    execution = executed(engine)
    gradient = execution.ranks[2].steps[1].grads
    assert gradient is not None
    element = gradient["tail.linear1.weight"][1]
    right = element[2].clone()
    element[2] = torch.nextafter(right, torch.tensor(torch.inf, dtype=torch.float64))
    shape_matched_replay.assert_gradients_sum(execution)
    element[2] = right * (1 + 1e-12)
    with pytest.raises(Violation, match=r"step 1, rank 2, tail.linear1.weight\[1, 2\]; 1 of 15"):
        shape_matched_replay.assert_gradients_sum(execution)


def test_an_update_that_is_not_the_optimizers_is_found(engine: SimulatedEngine) -> None:
    execution = executed(engine)
    execution.ranks[1].steps[0].params["tail.linear1.weight"][0, 0] += 1e-12
    with pytest.raises(Violation, match="the update is not the optimizer's"):
        shape_matched_replay.assert_updates_follow(execution)


def test_gradients_that_are_no_ones_of_the_parameters_are_violations_not_crashes(engine: SimulatedEngine) -> None:
    execution = executed(engine)
    record = execution.ranks[1].steps[0]
    right = record.grads
    assert right is not None
    name, value = next(iter(right.items()))
    for wrong in ({**right, "extra": value}, {name: value}, {**right, name: value.float()}):
        record.grads = wrong
        with pytest.raises(Violation, match="not of every trained parameter") as caught:
            shape_matched_replay.assert_updates_follow(execution)
        assert caught.value.where.startswith("step 0, rank 1")
    record.grads = None
    with pytest.raises(UsageError, match="observe 'grads'"):
        shape_matched_replay.assert_updates_follow(execution)


def test_factors_that_are_no_numbers_or_too_few_are_violations_not_crashes(engine: SimulatedEngine) -> None:
    case = replace(REAL, step=replace(REAL.step, clipping="probe", clip_norm=2))
    execution = executed(engine, case)
    shape_matched_replay.assert_gradients_sum(execution)
    record = execution.ranks[0].steps[0]
    assert record.factors is not None
    record.factors[0] = torch.nan
    with pytest.raises(Violation, match=r"a reported value is not finite\n  got     nan"):
        shape_matched_replay.assert_gradients_sum(execution)
    record.factors = record.factors[1:]
    with pytest.raises(Violation, match=r"got     float64\[2\]"):
        shape_matched_replay.assert_gradients_sum(execution)
    record.factors = None
    with pytest.raises(UsageError, match="observe 'factors'"):
        shape_matched_replay.assert_gradients_sum(execution)


def test_a_case_of_real_numbers_has_no_exact_answer(engine: SimulatedEngine) -> None:
    with pytest.raises(UsageError, match="no exact answer; next: judge it by replay"):
        Run(engine, "reference").answer(REAL)


def test_the_bound_counts_additions_and_averaging() -> None:
    unit = Fraction(1, 2**53)

    def near(case: TrainingCase, roundings: int) -> bool:
        return shape_matched_replay.sum_bound(case) == roundings * unit / (1 - roundings * unit)

    assert near(REAL, 2 + 3)
    assert near(replace(REAL, mesh=MeshSpec(2), layout=BatchLayout("contiguous", 4), step=StepSpec()), 1)
    assert near(replace(REAL, mesh=MeshSpec(1), layout=BatchLayout("contiguous", 4), step=StepSpec()), 0)
    assert near(replace(REAL, mesh=MeshSpec(3, 2), layout=BatchLayout("contiguous", 6), step=StepSpec()), 5 + 6)


@pytest.mark.parametrize("address", range(0, 64, 8))
def test_parameters_are_placed_at_any_address(address: int) -> None:
    value = torch.arange(15, dtype=torch.float64).view(3, 5)
    placed = shape_matched_replay._placed(value, address)
    assert torch.equal(placed, value)
    assert placed.data_ptr() % 64 == address


@pytest.mark.parametrize("adapter", ["reference", "fully_shard", "fsdp1"])
def test_where_parameters_lay_is_recorded_for_real_numbers_only(engine: SimulatedEngine, adapter: str) -> None:
    execution = executed(engine, adapter=adapter)
    for result in execution.ranks:
        assert result.placement.keys() == result.initial.keys()
        assert all(address % 8 == 0 for address in result.placement.values())
    grid = replace(REAL, model=replace(REAL.model, layers=REAL.model.layers[1:]), arithmetic=Arithmetic(project=False))
    assert not any(result.placement for result in executed(engine, grid, adapter).ranks)


def test_averages_below_the_normal_numbers_have_room_to_round_and_no_more() -> None:
    """Eight multiples of the smallest number; their sum over 8 rounds, by less than the room of one division."""
    case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(8))
    least = shape_matched_replay.underflow_bound(case)
    terms = [torch.tensor([5e-324 * k], dtype=torch.float64) for k in (1, 2, 2, 4, 1, 1, 1, 1)]
    near = shape_matched_replay._rounded_average(terms, 8)
    for off, beyond in ((0, False), (1, False), (200, True)):
        got, elsewhere = near + 5e-324 * off, torch.ones(1, dtype=torch.float64)
        mask = shape_matched_replay._beyond(got, elsewhere, terms, 8, shape_matched_replay.sum_bound(case), least)
        assert bool(mask.any()) == beyond
