"""The seed of samplers: another gives other orders and other draws, of which chance makes none equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck.adapters.capabilities import Drawn
from fsdpcheck.case import MeshSpec, SamplerCase
from fsdpcheck.case.sampler import SamplingSpec
from fsdpcheck.checks.sampler_seeds import FALSE_ALARM, assert_seed_matters, chance
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program.samplers import SAMPLER

SHUFFLED = SamplingSpec(records=16, batch_size=8, epochs=2, shuffle=True)
EVEN = SamplingSpec("poisson", records=2, steps=40, rate=0.5)
TWO = MeshSpec(2)
Lists = list[list[list[tuple[int, ...]]]]
"""By rank, epoch and step: records."""


def execution(spec: SamplingSpec, lists: Lists, seed: int = 1) -> Execution:
    ranks = []
    for rank, epochs in enumerate(lists):
        ranks.append(RankResult(rank))
        for number, epoch in enumerate(epochs):
            drawn = [Drawn((step,)) for step in epoch]
            ranks[-1].observations.append((SAMPLER, "epoch", number, drawn))
    return Execution("made up", RunRequest(SamplerCase(spec, TWO, seed), "made up"), ranks)


def dealt(*orders: list[int]) -> Lists:
    """Each epoch's order dealt out to two ranks."""
    return [[[tuple(order[rank::2])] for order in orders] for rank in (0, 1)]


UP, DOWN = list(range(16)), list(range(15, -1, -1))
SWAPPED = [1, 0, *UP[2:]]


def test_other_orders_pass_also_where_one_is_another_epoch_of_the_other_seed() -> None:
    assert_seed_matters(execution(SHUFFLED, dealt(UP, DOWN)), execution(SHUFFLED, dealt(DOWN, SWAPPED), seed=0))


def test_an_order_that_is_the_same_in_one_epoch_is_a_violation_and_in_all_it_has_a_cause() -> None:
    first = execution(SHUFFLED, dealt(UP, DOWN))
    with pytest.raises(Violation, match="another seed gives the same order") as caught:
        assert_seed_matters(first, execution(SHUFFLED, dealt(SWAPPED, DOWN), seed=0))
    assert caught.value.where == "epoch 1, seed 0"
    assert caught.value.cause == ""
    with pytest.raises(Violation) as caught:
        assert_seed_matters(first, execution(SHUFFLED, dealt(UP, DOWN), seed=0))
    assert caught.value.cause == "the seed does not reach the shuffle"


def draws(*ranks: int) -> Lists:
    """Of a record a rank, 40 draws: those with a one among the bits of a number."""
    return [[[(rank,) if bits >> step & 1 else () for step in range(40)]] for rank, bits in enumerate(ranks)]


def test_every_share_that_draws_a_record_draws_others() -> None:
    first = execution(EVEN, draws(0b1011, 0b1))
    assert_seed_matters(first, execution(EVEN, draws(0b1101, 0b10), seed=0))
    assert_seed_matters(execution(EVEN, draws(0b1, 0)), execution(EVEN, draws(0b10, 0), seed=0))
    with pytest.raises(Violation, match="another seed gives the same draws") as caught:
        assert_seed_matters(first, execution(EVEN, draws(0b1101, 0b1), seed=0))
    assert "on shares [1] of 2" in caught.value.got
    assert caught.value.cause == "the seed does not reach the draws"


def test_the_chance_that_two_seeds_give_the_same_is_counted() -> None:
    assert chance(SamplerCase(replace(SHUFFLED, records=3, epochs=1), TWO)) == 1 / 6
    assert chance(SamplerCase(replace(SHUFFLED, records=3, epochs=1, drop_last=True), TWO)) == 1 / 6
    assert chance(SamplerCase(replace(SHUFFLED, records=5, drop_last=True), MeshSpec(4))) == 2 / 120
    assert chance(SamplerCase(EVEN, TWO)) == 2 * 0.5**40 < FALSE_ALARM
    assert chance(SamplerCase(replace(EVEN, rate=1.0), TWO)) > 1
    assert chance(SamplerCase(replace(SHUFFLED, shuffle=False), TWO)) == 1


def test_what_chance_may_make_equal_is_not_judged() -> None:
    few = replace(SHUFFLED, records=4)
    orders = dealt([0, 1, 2, 3], [1, 0, 2, 3])
    with pytest.raises(UsageError, match=r"two seeds give the same with probability 8\.3e-02"):
        assert_seed_matters(execution(few, orders), execution(few, orders, seed=0))
    one = execution(SHUFFLED, dealt(UP, DOWN))
    for other in (one, execution(replace(SHUFFLED, batch_size=4), dealt(UP, DOWN), seed=0)):
        with pytest.raises(UsageError, match="something else than the seed"):
            assert_seed_matters(one, other)
