"""Epochs dealt out to ranks: torch's own lists where nothing is shuffled, and shares over both axes of a mesh."""

from __future__ import annotations

from itertools import product

import pytest
from torch.utils.data import DistributedSampler

from fsdpcheck.impl.clipping.batch_layout import DISTRIBUTED, REPLICATED, Layouts
from fsdpcheck.impl.noise import gaussian
from fsdpcheck.impl.sampling.epochs import EpochSampler
from fsdpcheck.impl.sharding.collectives import ALONE, Axis

KEY = gaussian.seeded(3)


def sampler(
    size: int, batch: int, rank: int, world: int, shuffle: bool = False, drop_last: bool = False
) -> EpochSampler:
    return EpochSampler(size, batch, KEY, DISTRIBUTED, Axis(None, rank, world), ALONE, shuffle, drop_last)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_unshuffled_shares_are_those_of_torch(world: int, drop_last: bool) -> None:
    for size, rank in product((1, 2, 7, 12), range(world)):
        own = sampler(size, 4, rank, world, drop_last=drop_last)
        theirs = DistributedSampler(range(size), world, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
        assert [record for step in own.steps(0) for record in step.records] == list(theirs)


def test_entries_that_repeat_a_record_are_marked() -> None:
    marked = [step.repeats for rank in range(3) for step in sampler(7, 2, rank, 3).steps(0)]
    assert marked == [(), (), (), (0,), (), (1,)]


def test_orders_follow_from_key_and_epoch_alone() -> None:
    one, two = sampler(20, 4, 0, 1, shuffle=True), sampler(20, 4, 0, 1, shuffle=True)
    assert one.order(1) == two.order(1) != one.order(0) != list(range(20))
    assert sorted(one.order(1)) == list(range(20))
    assert list(one.steps(1, 2)) == list(one.steps(1))[2:]


@pytest.mark.parametrize(
    ("layouts", "numbers", "count"),
    [
        (DISTRIBUTED, [0, 1, 2, 3, 4, 5], 6),
        (REPLICATED, [0] * 6, 1),
        (Layouts("replicated", "distributed"), [0, 0, 0, 1, 1, 1], 2),
        (Layouts("distributed", "replicated"), [0, 1, 2, 0, 1, 2], 3),
    ],
)
def test_shares_over_three_shards_and_two_replicas(layouts: Layouts, numbers: list[int], count: int) -> None:
    places = [(Axis(None, place, 3), Axis(None, replica, 2)) for replica in range(2) for place in range(3)]
    assert [layouts.share(*axes) for axes in places] == [(number, count) for number in numbers]


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0 records, 1 a step"):
        sampler(0, 1, 0, 1)
