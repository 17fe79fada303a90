"""Rings across groups, on hand-written traces: as ranks wait for their calls, and as devices run what was issued."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsdpcheck.execution import orders
from fsdpcheck.execution.deadlock import analyse
from fsdpcheck.execution.matching import match
from fsdpcheck.execution.orders import ring, ring_in_order_of_issue
from fsdpcheck.execution.trace import Collective

AT_ONCE, NEVER = 0, 99
Row = tuple[Collective, int]


def call(group: str, *ranks: int, line: int = 0, number: int = 0, waits: bool = False) -> Collective:
    where = f"train.py:{line}" if line else ""
    return Collective("all_reduce", ranks, group, number, "sum", asynchronous=not waits, where=where)


def times(*waited_after: int) -> list[tuple[int, ...]]:
    """Moments of calls: call k is waited for after ``waited_after[k]`` further ones were issued, or NEVER."""
    return [
        (10 * place,) if after == NEVER else (10 * place, 10 * (place + after) + 1 + place, 10 * (place + after) + 9)
        for place, after in enumerate(waited_after)
    ]


def said(demands: Sequence[orders.Demand]) -> list[tuple[int, str, str]]:
    return [(rank, first.group_name, then.group_name) for rank, first, then in demands]


A, B = call("a", 0, 1, waits=True), call("b", 0, 1, waits=True)


def test_two_groups_in_opposite_orders_are_a_ring_with_the_lines_of_both_ranks() -> None:
    traces = {
        0: (call("a", 0, 1, line=1, waits=True), call("b", 0, 1, line=2, waits=True)),
        1: (call("b", 0, 1, line=8, waits=True), call("a", 0, 1, line=9, waits=True)),
    }
    assert said(ring(traces)) == [(0, "a", "b"), (1, "b", "a")]
    failure = analyse(traces)
    assert failure is not None
    assert failure.kind == "unsafe"
    assert failure.text.split("\n") == [
        orders.AS_WAITED_FOR,
        "  rank 0: all_reduce() sum #0 on ranks [0, 1] (group 'a') at train.py:1 comes before "
        "all_reduce() sum #0 on ranks [0, 1] (group 'b') at train.py:2",
        "  rank 1: all_reduce() sum #0 on ranks [0, 1] (group 'b') at train.py:8 comes before "
        "all_reduce() sum #0 on ranks [0, 1] (group 'a') at train.py:9",
    ]


def test_three_groups_of_neighbours_are_a_ring_of_three() -> None:
    """Each two ranks agree; only all three together do not."""
    a, b, c = (call(name, *ranks, waits=True) for name, *ranks in (("a", 0, 1), ("b", 1, 2), ("c", 0, 2)))
    assert said(ring({0: (c, a), 1: (a, b), 2: (b, c)})) == [(0, "c", "a"), (1, "a", "b"), (2, "b", "c")]
    assert ring({0: (a, c), 1: (a, b), 2: (b, c)}) == ()


def test_the_shortest_ring_of_the_earliest_call_is_told() -> None:
    a, b, c, d = (call(name, *ranks, waits=True) for name, *ranks in (
        ("a", 0, 1, 2, 4), ("b", 0, 1), ("c", 2, 3), ("d", 3, 4),
    ))  # fmt: skip
    both_rings = {2: (a, c), 3: (c, d), 4: (d, a), 0: (a, b), 1: (b, a)}
    assert said(ring(both_rings)) == [(0, "a", "b"), (1, "b", "a")]
    long = tuple(call(name, 0, 1, number=number, waits=True) for number in range(3) for name in "ab")
    swapped = tuple(long[place] for place in (0, 1, 3, 2, 5, 4))
    assert [(demand.first.sequence, demand.then.sequence) for demand in ring({0: long, 1: swapped})] == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        ((AT_ONCE, AT_ONCE), (AT_ONCE, AT_ONCE), True),
        ((1, AT_ONCE), (AT_ONCE, AT_ONCE), False),  # rank 0 issues both before it waits
        ((1, AT_ONCE), (1, AT_ONCE), False),
        ((NEVER, AT_ONCE), (AT_ONCE, AT_ONCE), False),
    ],
)
def test_what_orders_is_the_wait_not_the_issue(mine: tuple[int, int], theirs: tuple[int, int], found: bool) -> None:
    """An asynchronous call orders nothing until it is waited for, and then what is issued after that."""
    traces = {0: (call("a", 0, 1), call("b", 0, 1)), 1: (call("b", 0, 1), call("a", 0, 1))}
    assert bool(ring(traces, {0: times(*mine), 1: times(*theirs)})) is found
    assert ring(traces) == (), "nothing is known of these waits"
    assert said(ring_in_order_of_issue(traces)) == [(0, "a", "b"), (1, "b", "a")]


def test_a_wait_orders_what_comes_long_after_it() -> None:
    """Rank 0 waits for a after issuing b; what it issues then, c, comes after a, though b does not."""
    traces = {
        0: (call("a", 0, 1), call("b", 0, 1), call("c", 0, 1)),
        1: (call("c", 0, 1), call("a", 0, 1), call("b", 0, 1)),
    }
    known = {0: times(1, NEVER, AT_ONCE), 1: times(AT_ONCE, AT_ONCE, AT_ONCE)}
    assert said(ring(traces, known)) == [(0, "a", "c"), (1, "c", "a")]


def test_waits_one_after_another_all_order_what_comes_then() -> None:
    """Rank 0 waits for a and then for b, which only rank 2 shares; c comes after both."""
    a, b, c = call("a", 0, 1), call("b", 0, 2), call("c", 0, 1)
    known = {0: times(1, AT_ONCE, AT_ONCE), 1: times(AT_ONCE, AT_ONCE), 2: times(AT_ONCE)}
    assert said(ring({0: (a, b, c), 1: (c, a), 2: (b,)}, known)) == [(0, "a", "c"), (1, "c", "a")]


def test_messages_are_ordered_by_waits_and_left_out_of_devices_order() -> None:
    there = Collective("send", (0, 1), "w", 0, tag=0), Collective("recv", (0, 1), "w", 0, tag=0)
    back = Collective("recv", (1, 0), "w", 0, tag=0), Collective("send", (1, 0), "w", 0, tag=0)
    traces = {0: (there[0], back[0]), 1: (back[1], there[1])}
    assert len(ring(traces)) == 2, "each sends before it receives, and neither buffers"
    assert ring_in_order_of_issue(traces) == ()


def test_a_device_that_runs_in_order_needs_one_order_of_all_its_groups() -> None:
    same = (call("a", 0, 1), call("b", 0, 1))
    assert ring_in_order_of_issue({0: same, 1: same}) == ()
    apart = {0: (call("a", 0, 1),), 1: (call("a", 0, 1), call("b", 1, 2)), 2: (call("b", 1, 2), call("c", 2))}
    assert ring_in_order_of_issue(apart) == ()
    assert ring_in_order_of_issue({0: (call("a", 0, 1),), 1: ()}) == (), "who never comes holds nobody up"


def test_only_what_a_ring_holds_up_is_told_of_a_long_run() -> None:
    fine = tuple(call(name, 0, 1, number=number) for number in range(200) for name in "ab")
    last = call("a", 0, 1, number=200), call("b", 0, 1, number=200)
    demands = ring_in_order_of_issue({0: (*fine, *last), 1: (*fine, *last[::-1])})
    assert [demand.first.sequence for demand in demands] == [200, 200]
    sides = match({0: last, 1: last})
    assert orders.text(orders.IN_ORDER, demands, sides).count("comes before") == 2
