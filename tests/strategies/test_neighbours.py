"""Neighbours: lists that differ by exactly what they say, and sums that differ by no more than they may."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import get_args

import pytest
import torch

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import TrainingCase, Trait
from fsdpcheck.checks.privacy import _limit, assert_others_keep_their_coefficient, assert_same_calls, assert_sensitivity
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from fsdpcheck.strategies import enumeration, neighbours
from fsdpcheck.strategies.neighbours import Neighbours
from fsdpcheck.workload import batches

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)) - {"real", "float32", "project"})
EQUAL_SHARES = Features(frozenset({"private"}), frozenset({"bias"}))


def moved(pair: Neighbours) -> Counter[int]:
    """How often each record occurs more in one than in the other."""
    one, other = (batches.logical_batch(case, 0) for case in (pair.first, pair.second))
    return (one - other) + (other - one)


@cache
def cases() -> list[TrainingCase]:
    return enumeration.distinct(strategies.cases_of(strategies.PRIVATE_PROBE, EVERYTHING), 24)


@pytest.fixture(scope="module")
def pairs() -> list[Neighbours]:
    return [neighbours.of(case, EVERYTHING) for case in cases()]


@cache
def answered(case: TrainingCase) -> Answer:
    return oracle.answer(case)


def test_all_three_relations_occur_in_both_directions(pairs: list[Neighbours]) -> None:
    sizes = {(pair.times, sum(pair.first.local_sizes) > sum(pair.second.local_sizes)) for pair in pairs}
    assert {(1, True), (1, False), (2, False), (2, True)} <= sizes
    assert any("replaced" in pair.words for pair in pairs)
    assert any("entries" in pair.words for pair in pairs)


def test_batches_differ_by_what_is_said(pairs: list[Neighbours]) -> None:
    for pair in pairs:
        assert set(moved(pair)) == pair.moved
        assert sum(moved(pair).values()) == pair.times
        assert replace(pair.first, layout=pair.second.layout) == pair.second


def test_where_shares_must_be_equal_a_record_is_replaced_or_nothing_is_claimed() -> None:
    found = 0
    for case in enumeration.distinct(strategies.cases_of(strategies.PRIVATE_PROBE, EQUAL_SHARES), 20):
        try:
            pair = neighbours.of(case, EQUAL_SHARES)
        except NotExact:
            continue
        found += 1
        assert all(len(set(own.local_sizes)) == 1 for own in (pair.first, pair.second))
        assert pair.first.world_size == 1 or "replaced" in pair.words
    assert found


def side(answer: Answer, factor: float = 1.0) -> tuple[Execution, Answer]:
    """A run that releases ``factor`` times the right gradient on every rank."""
    case, step = answer.case, answer.steps[0]
    grads = {name: value * factor for name, value in step.used.items()}
    ranks = []
    for rank in range(case.world_size):
        records = [StepRecord(own.after, grads) for own in answer.steps]
        ranks.append(RankResult(rank, step.before, records))
    return Execution("fabricated", RunRequest(case, "reference"), ranks), answer


def test_right_sums_are_within_the_limit_and_ones_a_part_in_a_thousand_too_large_are_not(
    pairs: list[Neighbours],
) -> None:
    """Among the drawn pairs there are some whose distance is the whole limit: there the check is sharp."""
    sharp = 0
    for pair in pairs:
        first, second = answered(pair.first), answered(pair.second)
        assert_sensitivity(pair, side(first), side(second))
        try:
            assert_sensitivity(pair, side(first, 1.001), side(second, 1.001))
        except Violation as violation:
            sharp += "at most" in violation.wanted
    assert sharp >= 5


def test_a_gradient_that_is_not_finite_is_a_violation(pairs: list[Neighbours]) -> None:
    first, second = answered(pairs[0].first), answered(pairs[0].second)
    with pytest.raises(Violation, match="not finite"):
        assert_sensitivity(pairs[0], side(first), side(second, float("nan")))


def test_a_gradient_of_some_parameters_is_not_the_released_one(pairs: list[Neighbours]) -> None:
    first, second = (side(answered(case)) for case in (pairs[0].first, pairs[0].second))
    for execution in (first[0], second[0]):
        for result in execution.ranks:
            result.steps[0].grads = {}
    with pytest.raises(Violation, match="not of every trained parameter"):
        assert_sensitivity(pairs[0], first, second)


def test_the_coefficient_of_a_record_that_is_in_both_batches_is_compared_and_without_one_nothing_is_claimed(
    pairs: list[Neighbours],
) -> None:
    alone = 0
    for pair in pairs:
        first, second = (side(answered(case)) for case in (pair.first, pair.second))
        if not (batches.logical_batch(pair.first, 0) & batches.logical_batch(pair.second, 0)).keys() - pair.moved:
            alone += 1
            with pytest.raises(NotExact, match="no record is in both"):
                assert_others_keep_their_coefficient(pair, first, second)
            continue
        assert_others_keep_their_coefficient(pair, first, second)
        with pytest.raises(Violation, match="coefficient of a record depends"):
            assert_others_keep_their_coefficient(pair, first, side(second[1], 1 + 2**-20))
    assert 0 < alone < len(pairs)


def test_calls_are_compared_by_their_sizes(pairs: list[Neighbours]) -> None:
    one, other = (side(answered(case))[0] for case in (pairs[0].first, pairs[0].second))
    call = Collective("all_reduce", (0,), "world", 0, inputs=(("float64", (2,)),))
    longer = Collective("all_reduce", (0,), "world", 0, inputs=(("float64", (3,)),))
    one.ranks[0].trace = other.ranks[0].trace = (call,)
    assert_same_calls(pairs[0], one, other)
    for trace in ((), (longer,), (call, call)):
        other.ranks[0].trace = trace
        with pytest.raises(Violation, match="what is sent depends"):
            assert_same_calls(pairs[0], one, other)


def test_the_limit_is_the_clip_norm_up_to_rounding(pairs: list[Neighbours]) -> None:
    for pair in pairs[:10]:
        first, second = answered(pair.first), answered(pair.second)
        ratio = _limit(pair, side(first), side(second)) / (pair.times * Fraction(math.hypot(*first.clip_norms)))
        assert 1 - Fraction(1, 2**50) <= ratio < 1 + Fraction(1, 2**20), float(ratio)
        assert torch.isfinite(first.steps[0].factors).all()
