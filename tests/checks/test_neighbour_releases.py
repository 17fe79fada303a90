"""Replayed trainings: what differs although the releases are the same is found at every step, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule, Features
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.checks.invariance import Side
from fsdpcheck.checks.neighbour_releases import assert_replayed, releases_of
from fsdpcheck.errors import NotApplicable
from fsdpcheck.execution import Execution
from fsdpcheck.execution.releases import Release
from fsdpcheck.findings.violation import Violation
from fsdpcheck.strategies import neighbours
from fsdpcheck.workload.clip_groups import INSTRUMENT
from tests.common.fabricated import execution

CASE = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True),), features=2),
    MeshSpec(2),
    BatchLayout("contiguous", 5),
    StepSpec(steps=3, clipping="probe", clip_norm=4, normaliser=8),
    seed=4,
)
PAIR = neighbours.of(CASE, Features(frozenset({"private"}), frozenset(get_args(Trait))))
RULE = FactorRule(eps=1e-6)


def sides() -> tuple[Side, Side]:
    """Two right trainings, the second under the releases of the first."""
    one = oracle.answer(PAIR.first, RULE)
    two = oracle.answer(PAIR.second, RULE, forced=one)
    return (called(execution(one)), one), (called(execution(two)), two)


def called(made: Execution, rate: float = 0.25) -> Execution:
    for result in made.ranks:
        result.releases = [Release(step, (), {"lr of group 0": rate}) for step in range(CASE.step.steps)]
    return made


def test_the_answer_under_other_releases_has_their_parameters_and_its_own_gradients() -> None:
    (_, one), (_, two) = sides()
    own = oracle.answer(PAIR.second, RULE)
    assert all(
        torch.equal(a.after[name], b.after[name]) for a, b in zip(one.steps, two.steps, strict=True) for name in a.after
    )
    assert torch.equal(own.steps[0].used[INSTRUMENT], two.steps[0].used[INSTRUMENT])
    assert any(not torch.equal(own.steps[2].before[name], two.steps[2].before[name]) for name in own.steps[2].before)


def test_right_trainings_under_the_same_releases_are_alike() -> None:
    assert_replayed(PAIR, *sides(), coefficients=True)
    assert len(releases_of(sides()[0][0])[1]) == CASE.step.steps


@pytest.mark.parametrize("step", [0, 2])
def test_a_release_that_one_record_moves_too_far_is_found(step: int) -> None:
    first, second = sides()
    for result in second[0].ranks:
        assert result.steps[step].grads is not None
        result.steps[step].grads[INSTRUMENT][0] += 2 * 4  # type: ignore[index]
    with pytest.raises(Violation, match="more than its clip norm allows") as caught:
        assert_replayed(PAIR, first, second, coefficients=False)
    assert caught.value.where.startswith(f"step {step}, rank 0")


def test_a_weight_that_follows_other_records_is_found_in_a_later_step() -> None:
    first, second = sides()
    kept = next(record for record in range(5) if record not in PAIR.moved)
    for result in second[0].ranks:
        result.steps[1].grads[INSTRUMENT].flatten()[kept] *= 0.5  # type: ignore[index]
    with pytest.raises(Violation, match="the coefficient of a record depends") as caught:
        assert_replayed(PAIR, first, second, coefficients=True)
    assert caught.value.where.startswith("step 1, rank 0")
    assert "follows other records" in caught.value.cause


def test_another_rate_another_number_of_calls_and_other_parameters_are_found() -> None:
    first, second = sides()
    with pytest.raises(Violation, match="an option of the optimizer") as caught:
        assert_replayed(PAIR, first, (called(second[0], 0.5), second[1]), coefficients=True)
    assert "the learning rate follows" in caught.value.cause
    called(second[0]).ranks[1].releases.pop()
    with pytest.raises(Violation, match="whether the optimizer is called") as caught:
        assert_replayed(PAIR, first, second, coefficients=True)
    assert caught.value.where.startswith("step 2, rank 1")
    called(second[0]).ranks[1].steps[0].params[INSTRUMENT][0] += 1
    with pytest.raises(Violation, match="parameters depend on one record"):
        assert_replayed(PAIR, first, second, coefficients=True)


def test_trainings_that_cannot_be_given_other_gradients_are_not_judged() -> None:
    first, second = sides()
    second[0].ranks[0].releases[0] = replace(second[0].ranks[0].releases[0], kept=False)
    with pytest.raises(NotApplicable, match="set anew"):
        assert_replayed(PAIR, first, second, coefficients=True)
    for result in first[0].ranks:
        result.releases = []
    with pytest.raises(NotApplicable, match="no optimizer"):
        releases_of(first[0])
