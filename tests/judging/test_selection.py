"""Which of the drawn cases are judged first: those that differ in the most for what they cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from fsdpcheck import adapters, strategies
from fsdpcheck.case import Case, StepSpec
from fsdpcheck.judging.drawing import Batch
from fsdpcheck.judging.selection import kinds, price, spread
from tests.common.laws_by_hand import a_case


@pytest.fixture(scope="module")
def drawn() -> tuple[Case, ...]:
    features = adapters.declared("reference").features
    return Batch(strategies.cases_of(strategies.PLAIN, features, (1, 2, 3)), 60, 5, 60).draw().cases


def _pairs(cases: tuple[Case, ...]) -> int:
    return len({pair for case in cases for pair in combinations(sorted(kinds(case)), 2)})


def test_the_first_ten_have_more_pairs_of_kinds_than_the_first_that_were_drawn_and_cost_less(
    drawn: tuple[Case, ...],
) -> None:
    chosen = tuple(spread(drawn, 10))
    assert sorted(map(repr, chosen)) == sorted(map(repr, drawn))
    assert _pairs(chosen[:10]) / sum(map(price, chosen[:10])) > 1.3 * _pairs(drawn[:10]) / sum(map(price, drawn[:10]))
    distinct = dict.fromkeys(drawn)
    assert list(chosen[10 : len(distinct)]) == [case for case in distinct if case not in chosen[:10]]
    assert set(chosen[len(distinct) :]) <= set(chosen[: len(distinct)])
    assert tuple(spread(drawn, 10)) == chosen


def test_an_equal_case_is_judged_last_and_a_dear_one_after_a_cheap_one_that_has_as_much() -> None:
    one, other, dear = a_case(1, 1), a_case(2, 1), replace(a_case(3, 1), step=StepSpec(steps=3))
    assert spread([one, one, other], 2) == [one, other, one]
    alike = [a_case(1, batch) for batch in (5, 6, 7)]  # of one kind, and three cases
    assert spread([alike[0], alike[0], *alike], 2) == [*alike, alike[0], alike[0]]
    assert price(dear) > price(one)
    assert spread([dear, one], 1) == [one, dear]
    assert spread([one, dear], 0) == [one, dear]


def test_each_number_of_ranks_that_was_drawn_is_among_the_first_as_far_as_they_suffice() -> None:
    features = adapters.declared("reference").features
    drawn = Batch(strategies.cases_of(strategies.PLAIN, features, (1, 2, 5, 13)), 60, 5, 60).draw().cases
    assert {case.world_size for case in spread(drawn, 10)[:10]} == {1, 2, 5, 13}
    assert {case.world_size for case in spread(drawn, 4)[:4]} == {1, 2, 5, 13}
    assert len({case.world_size for case in spread(drawn, 3)[:3]}) == 3
    cheap = [a_case(world, 1) for world in (1, 1, 2)]
    assert spread(cheap, 1) == [cheap[0], cheap[2], cheap[1]]


def test_what_a_case_is_like_is_told_by_words_and_small_numbers_and_never_by_its_seed() -> None:
    small = a_case(1, 1)
    assert kinds(replace(small, seed=7)) == kinds(small)
    assert kinds(a_case(1, 3)) != kinds(small)
    assert kinds(replace(small, layout=replace(small.layout, batch_size=5))) == kinds(
        replace(small, layout=replace(small.layout, batch_size=6))
    )


def test_micro_batches_that_are_empty_stand_for_none_that_is_full() -> None:
    """One sample in three micro-batches costs what six do, and shows nothing of the third."""
    empty, full = (replace(a_case(2, batch), step=StepSpec(micro_batches=3)) for batch in (1, 6))
    assert price(empty) == price(full)
    assert {"ranks with samples: 1", "micro-batches with samples: 1"} <= kinds(empty)
    assert {"ranks with samples: 2", "micro-batches with samples: many", "samples of a micro-batch: 1"} <= kinds(full)
    assert "samples of a micro-batch: many" in kinds(a_case(1, 6))
