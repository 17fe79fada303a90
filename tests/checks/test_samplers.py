"""Checks of samplers on lists that are made up: right ones pass, and each mistake is told from all others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdpcheck.adapters.capabilities import Drawn
from fsdpcheck.case import MeshSpec, SamplerCase
from fsdpcheck.case.sampler import AxisLayout, SamplingSpec, epoch_steps, share_count, share_of
from fsdpcheck.checks.lifecycle import assert_released
from fsdpcheck.checks.poisson import assert_poisson, assert_rate
from fsdpcheck.checks.samplers import (
    assert_dealt_out,
    assert_equal_steps,
    assert_goes_on,
    assert_one_rank_each,
    assert_orders,
    assert_same_draws,
)
from fsdpcheck.checks.shuffled_epochs import assert_come_everywhere
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program.samplers import SAMPLER
from tests.common.fabricated import SMALL

Lists = list[list[list[tuple[int, ...]]]]
"""By rank, epoch and step: records."""


def execution(
    spec: SamplingSpec, mesh: MeshSpec, lists: Lists, repeats: dict[int, tuple[int, ...]] | None = None
) -> Execution:
    """Ranks that drew ``lists``, one micro-batch a step; ``repeats``: by rank, of the last step of each epoch."""
    ranks = []
    for rank, epochs in enumerate(lists):
        result = RankResult(rank)
        for number, epoch in enumerate(epochs):
            drawn = [Drawn((step,), None if repeats is None else ()) for step in epoch]
            if repeats is not None:
                drawn[-1] = Drawn((epoch[-1],), repeats.get(rank, ()))
            result.observations.append((SAMPLER, "epoch", number, drawn))
        ranks.append(result)
    return Execution("made up", RunRequest(SamplerCase(spec, mesh, 1), "made up"), ranks)


FIVE = SamplingSpec(records=5, batch_size=2)
TWO = MeshSpec(2)
WRAPPED: Lists = [[[(0, 2), (4,)]], [[(1, 3), (0,)]]]


def broken(check: Callable[..., None], *executions: Execution) -> Violation:
    with pytest.raises(Violation) as caught:
        check(*executions)
    return caught.value


def test_the_geometry_of_shares() -> None:
    mesh = MeshSpec(dp_shard=3, dp_replicate=2)
    numbers: dict[tuple[AxisLayout, AxisLayout], list[int]] = {
        ("distributed", "distributed"): [0, 1, 2, 3, 4, 5],
        ("replicated", "distributed"): [0, 0, 0, 1, 1, 1],
        ("distributed", "replicated"): [0, 1, 2, 0, 1, 2],
        ("replicated", "replicated"): [0] * 6,
    }
    for (shards, replicas), wanted in numbers.items():
        spec = SamplingSpec(shards=shards, replicas=replicas)
        assert [share_of(spec, mesh, rank) for rank in range(6)] == wanted
        assert share_count(spec, mesh) == len(set(wanted))
    assert [epoch_steps(SamplingSpec(records=n, batch_size=2), TWO) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert epoch_steps(SamplingSpec(records=5, batch_size=2, drop_last=True), TWO) == 1


def test_wrapped_shares_pass_marked_or_not() -> None:
    assert_dealt_out(execution(FIVE, TWO, WRAPPED))
    assert_dealt_out(execution(FIVE, TWO, WRAPPED, {1: (0,)}))
    assert_equal_steps(execution(FIVE, TWO, WRAPPED))


@pytest.mark.parametrize(
    ("lists", "repeats", "what"),
    [
        ([[[(0, 2), (4,)]], [[(1, 2), (0,)]]], None, "as often as promised"),  # 3 nowhere, 2 twice
        ([[[(0, 2), (4,)]], [[(1, 3)]]], None, "equally long"),
        ([[[(0, 2), (4,)]], [[(1, 3), (0,)]]], {}, "marks"),
        ([[[(0, 2), (4,)]], [[(1, 3), (0,)]]], {0: (4,), 1: (0,)}, "marks"),
    ],
    ids=["overlap", "length", "not marked", "marked too much"],
)
def test_shares_that_are_none(lists: Lists, repeats: dict[int, tuple[int, ...]] | None, what: str) -> None:
    assert what in broken(assert_dealt_out, execution(FIVE, TWO, lists, repeats)).what


def test_shares_that_are_rounded_down_are_named_and_a_short_one_alone_is_not() -> None:
    found = broken(assert_dealt_out, execution(FIVE, TWO, [[[(0, 2)]], [[(1, 3)]]]))
    assert found.cause == "the length of shares is rounded down: one of 5 records is in no share"
    two = broken(
        assert_dealt_out, execution(replace(FIVE, records=8), MeshSpec(3), [[[(0, 3)]], [[(1, 4)]], [[(2, 5)]]])
    )
    assert two.cause == "the length of shares is rounded down: 2 of 8 records are in no share"
    assert broken(assert_dealt_out, execution(FIVE, TWO, [[[(0, 2), (4,)]], [[(1, 3)]]])).cause == ""
    assert broken(assert_dealt_out, execution(FIVE, TWO, [[[(0, 2)]], [[(1,)]]])).cause == ""


def test_replicas_have_one_share() -> None:
    spec = SamplingSpec(records=4, batch_size=4, replicas="replicated")
    mesh = MeshSpec(dp_shard=1, dp_replicate=2)
    assert_dealt_out(execution(spec, mesh, [[[(0, 1, 2, 3)]]] * 2))
    found = broken(assert_dealt_out, execution(spec, mesh, [[[(0, 1, 2, 3)]], [[(0, 1, 3, 2)]]]))
    assert "replicated axis" in found.what


def test_ranks_dealt_to_along_the_wrong_axis_are_told_from_ranks_that_differ_otherwise() -> None:
    spec = SamplingSpec(records=4, batch_size=2, replicas="replicated")
    mesh = MeshSpec(dp_shard=2, dp_replicate=2)
    even, odd = [[(0, 2)]], [[(1, 3)]]
    assert_dealt_out(execution(spec, mesh, [even, odd, even, odd]))
    assert "axis is not the one" in broken(assert_dealt_out, execution(spec, mesh, [even, even, odd, odd])).cause
    assert broken(assert_dealt_out, execution(spec, mesh, [even, odd, odd, even])).cause == ""


def test_marks_of_ranks_along_a_replicated_axis_are_compared_too() -> None:
    spec = SamplingSpec(records=1, batch_size=1, replicas="replicated")
    mesh, one = MeshSpec(dp_shard=2, dp_replicate=2), [[(0,)]]
    assert_dealt_out(execution(spec, mesh, [one] * 4, {1: (0,), 3: (0,)}))
    found = broken(assert_dealt_out, execution(spec, mesh, [one] * 4, {2: (0,), 3: (0,)}))
    assert "replicated axis" in found.what
    assert "(0,) repeat" in found.got
    assert "axis is not the one" in found.cause


def test_shares_that_overlap_are_told_by_what_they_have_in_common() -> None:
    spec = SamplingSpec(records=4, batch_size=2)
    apart = broken(assert_dealt_out, execution(spec, TWO, [[[(0, 2)]], [[(2, 3)]]]))
    assert "do not split one and the same order" in apart.cause
    same = broken(assert_dealt_out, execution(spec, TWO, [[[(0, 2)]], [[(0, 2)]]]))
    assert "do not split by their own number" in same.cause
    few = SamplingSpec(records=2, batch_size=1)
    assert broken(assert_dealt_out, execution(few, TWO, [[[(0,)]], [[(0,)]]])).cause == ""
    lost = broken(assert_dealt_out, execution(spec, TWO, [[[(0, 0)]], [[(1, 3)]]]))
    assert lost.cause == ""
    ordered = execution(spec, TWO, [[[(0, 2)]], [[(2, 3)]]])
    assert broken(assert_orders, ordered, ordered).cause == apart.cause


def test_marks_that_are_missing_are_told_from_marks_of_other_entries() -> None:
    none = broken(assert_dealt_out, execution(FIVE, TWO, WRAPPED, {0: ()}))
    assert none.cause == "entries that repeat a record are not marked as such"
    others = broken(assert_dealt_out, execution(FIVE, TWO, WRAPPED, {0: (4,)}))
    assert others.cause == "entries that repeat a record are not marked as such: others are"


def test_steps_without_empty_micro_batches_are_said_to_leave_them_out() -> None:
    spec = SamplingSpec("poisson", records=4, steps=2, rate=0.5)
    made = execution(spec, TWO, [[[(), (1,)]], [[(3,), (2,)]]])
    emptied = made.ranks[0].observations[0][3]
    emptied[0] = Drawn((), None)
    assert broken(assert_equal_steps, made).cause == "empty micro-batches are left out"
    emptied[1] = Drawn(((1,), ()), None)
    assert broken(assert_equal_steps, made).cause == ""


def test_ranks_out_of_step() -> None:
    short = broken(assert_equal_steps, execution(FIVE, TWO, [[[(0, 2), (4,)]], [[(1, 3)]]]))
    assert (short.got, short.wanted) == ("1 steps", "2 steps, as all ranks")
    assert "shares are not made equally long" in short.cause
    cut = broken(assert_equal_steps, execution(FIVE, TWO, [[[(0, 2)]], [[(1, 3)]]]))
    assert cut.cause == ""
    long = broken(assert_equal_steps, execution(FIVE, TWO, [[[(0, 2, 4), ()]], [[(1, 3), (0,)]]]))
    assert "longer than was asked for" in long.what
    spec = SamplingSpec("poisson", records=4, steps=2, rate=0.5)
    empty = broken(assert_equal_steps, execution(spec, TWO, [[[(0,), ()]], [[(3,)]]]))
    assert "draws no record are left out" in empty.cause
    assert_equal_steps(execution(spec, TWO, [[[(0,), ()]], [[(3,), ()]]]))


def test_orders_of_epochs() -> None:
    spec = SamplingSpec(records=16, batch_size=16, epochs=2, shuffle=True)
    straight, other, third = (tuple(random.Random(seed).sample(range(16), 16)) for seed in (1, 2, 3))
    good = execution(spec, MeshSpec(), [[[straight], [other]]])
    assert_orders(good, good)
    repeated = execution(spec, MeshSpec(), [[[straight], [straight]]])
    assert "repeats the order of epoch 0" in broken(assert_orders, repeated, repeated).cause
    sorted_one = execution(spec, MeshSpec(), [[[straight], [tuple(range(16))]]])
    assert "repeats the order of the data set" in broken(assert_orders, sorted_one, sorted_one).cause
    assert "does not follow" in broken(assert_orders, good, execution(spec, MeshSpec(), [[[straight], [third]]])).what
    still = SamplingSpec(records=4, batch_size=2, epochs=2)
    strided = execution(still, TWO, [[[(0, 2)]] * 2, [[(1, 3)]] * 2])
    blocks = execution(still, TWO, [[[(0, 1)]] * 2, [[(2, 3)]] * 2])
    assert_orders(strided, strided)
    assert_orders(blocks, blocks)
    moved = execution(still, TWO, [[[(0, 2)], [(2, 0)]], [[(1, 3)]] * 2])
    assert "wrong order" in broken(assert_orders, moved, moved).what


def test_records_that_never_come_to_a_share() -> None:
    spec = SamplingSpec(records=5, batch_size=2, epochs=106, shuffle=True, drop_last=True)
    chance = random.Random(0)
    orders = [chance.sample(range(5), 5) for _ in range(spec.epochs)]

    def dealt(orders: list[list[int]]) -> Execution:
        return execution(spec, TWO, [[[tuple(order[rank:4:2])] for order in orders] for rank in range(2)])

    assert_come_everywhere(dealt(orders))
    left_out = [sorted(order, key=lambda record: record == 4) for order in orders]
    assert "records 4 are left out" in broken(assert_come_everywhere, dealt(left_out)).cause
    kept = [[0, 1, 2, 3, 4] if order[0] % 2 else [2, 3, 4, 1, 0] for order in orders]
    assert "shuffled within shares" in broken(assert_come_everywhere, dealt(kept)).cause
    with pytest.raises(UsageError, match="wanted 1 shuffled"):
        assert_come_everywhere(execution(SamplingSpec(records=1), MeshSpec(), [[[(0,)]]]))


def test_a_sampler_that_goes_on() -> None:
    whole = execution(FIVE, TWO, WRAPPED)
    later = SamplingSpec(records=5, batch_size=2, start=1)
    assert_goes_on(whole, execution(later, TWO, [[[(4,)]], [[(0,)]]]))
    assert "begins again" in broken(assert_goes_on, whole, execution(later, TWO, [[[(4,)]], [[(1, 3)]]])).cause
    assert not broken(assert_goes_on, whole, execution(later, TWO, [[[(3,)]], [[(0,)]]])).cause


def test_what_was_not_drawn_is_not_compared() -> None:
    whole = execution(FIVE, TWO, WRAPPED)
    with pytest.raises(UsageError, match="a start above 0"):
        assert_goes_on(whole, whole)
    for rank in whole.ranks:
        rank.observations.clear()
    for check in (assert_dealt_out, assert_equal_steps, assert_one_rank_each):
        with pytest.raises(UsageError, match="0 of 1 epochs were observed on rank 0"):
            check(whole)


def test_a_record_on_two_ranks_and_draws_that_depend_on_ranks() -> None:
    spec = SamplingSpec("poisson", records=4, steps=1, rate=0.5)
    right = execution(spec, TWO, [[[(0, 1)]], [[(3,)]]])
    assert_one_rank_each(right)
    assert "shares [0, 1]" in broken(assert_one_rank_each, execution(spec, TWO, [[[(0, 1)]], [[(1,)]]])).got
    assert_same_draws(right, execution(spec, MeshSpec(), [[[(3, 0, 1)]]]))
    assert broken(assert_same_draws, right, execution(spec, MeshSpec(), [[[(0, 1)]]])).got == "[0, 1]"
    longer = broken(assert_same_draws, right, execution(spec, MeshSpec(), [[[(3, 0, 1), (2,)]]]))
    assert (longer.got, longer.wanted) == ("[2]", "[]")


def test_draws_that_hang_on_the_rank_are_told_from_those_that_hang_on_all_ranks() -> None:
    chance = random.Random(0)
    spec = SamplingSpec("poisson", records=4, steps=64, rate=0.5)
    first, second, third = ([tuple(r for r in own if chance.random() < 0.5) for _ in range(64)]
                            for own in ((0, 1), (2, 3), (2, 3)))  # fmt: skip
    one = execution(spec, TWO, [[first], [second]])
    alone = execution(spec, MeshSpec(), [[[(*a, *b) for a, b in zip(first, third, strict=True)]]])
    assert "depends on which rank makes it" in broken(assert_same_draws, one, alone).cause
    other = execution(spec, MeshSpec(), [[[(*a, *b) for a, b in zip(reversed(first), third, strict=True)]]])
    assert "drawn otherwise among other ranks" in broken(assert_same_draws, one, other).cause
    records = range(8)
    whole = [tuple(r for r in records if chance.random() < 0.5) for _ in range(64)]
    cut = [[[tuple(r for r in own if r in step)[:3] for step in whole]] for own in (records[:4], records[4:])]
    eight = replace(spec, records=8)
    assert "leaves some out" in broken(assert_same_draws, execution(eight, TWO, cut),
                                       execution(eight, MeshSpec(), [[whole]])).cause  # fmt: skip


# -- the joint law of Poisson draws ------------------------------------------------------------------------------------

STEPS, RECORDS, RATE = 256, 12, 0.25
Step = Callable[[random.Random, int, list[tuple[int, ...]]], set[int]]
"""(source of chance, number of the step, the steps before) -> the logical batch."""


def drawn(step: Step, seed: int = 0) -> Execution:
    """A batch a step, on two ranks that own half of the records each."""
    chance, batches = random.Random(seed), list[tuple[int, ...]]()
    for number in range(STEPS):
        batches.append(tuple(sorted(step(chance, number, batches))))
    half = RECORDS // 2
    own = [[tuple(r for r in batch if r // half == rank) for batch in batches] for rank in range(2)]
    spec = SamplingSpec("poisson", records=RECORDS, steps=STEPS, rate=RATE)
    return execution(spec, TWO, [[lists] for lists in own])


def poisson(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    return {record for record in range(RECORDS) if chance.random() < RATE}


def binomial_subset(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    """A binomial size, then a uniform subset of that size: the same law (jax_privacy#121)."""
    size = sum(chance.random() < RATE for _ in range(RECORDS))
    return set(chance.sample(range(RECORDS), size))


@pytest.mark.parametrize("law", [poisson, binomial_subset])
def test_right_draws_are_never_called_wrong(law: Step) -> None:
    """20 seeds each: by chance one of them would be with probability 4e-8."""
    for seed in range(20):
        made = drawn(law, seed)
        assert_poisson(made)
        assert_rate(made)


def truncated(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    """A binomial size, cut off where a batch is full: the variant of jax_privacy#121 that is wrong."""
    size = min(4, sum(chance.random() < RATE for _ in range(RECORDS)))
    return set(chance.sample(range(RECORDS), size))


def fixed(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    return set(chance.sample(range(RECORDS), int(RATE * RECORDS)))


def one_stream(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    own = {place for place in range(RECORDS // 2) if chance.random() < RATE}
    return own | {place + RECORDS // 2 for place in own}


def mostly_one_stream(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    """One stream in all steps but every eighth: no rank has the stream of the other."""
    return poisson(chance, number, before) if number % 8 == 0 else one_stream(chance, number, before)


def again(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    """The second half of the steps is the first: the counter of an epoch begins at 0 again."""
    return set(before[number - STEPS // 2]) if number >= STEPS // 2 else poisson(chance, number, before)


def seldom(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    return {record for record in range(RECORDS) if chance.random() < 0.6 * RATE}


def never_the_last(chance: random.Random, number: int, before: list[tuple[int, ...]]) -> set[int]:
    return poisson(chance, number, before) - {RECORDS - 1}


@pytest.mark.parametrize(
    ("law", "cause"),
    [
        (truncated, "the size of a batch is cut off at 4 records"),
        (fixed, "the size of a batch is fixed: every one has 3 records"),
        (one_stream, "records 0 and 6 of two shares always join together: ranks draw the same stream"),
        (again, "draws of a step are used again: those of the first 128 steps"),
        (seldom, "the probability is not 0.25"),
        (never_the_last, "records 11 are never drawn, others are"),
        (mostly_one_stream, ""),
    ],
)
def test_other_laws_are_named(law: Step, cause: str) -> None:
    said = broken(assert_poisson, drawn(law)).cause
    assert cause in said if cause else not said


def test_checks_of_something_else_say_so() -> None:
    with pytest.raises(UsageError, match="not one of a sampler"):
        assert_rate(Execution("made up", RunRequest(SMALL, "made up"), []))
    with pytest.raises(UsageError, match="got a run of a SamplerCase, wanted one that trains"):
        assert_released(execution(FIVE, TWO, WRAPPED))
