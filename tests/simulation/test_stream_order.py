"""The order that streams, events and the host make, and accesses that meet without one: without torch."""

from __future__ import annotations

import pytest

from fsdpcheck.simulation.device.history import Access, History, Span
from fsdpcheck.simulation.device.timelines import Timeline, Timelines


def access(timeline: Timeline, span: Span, writes: bool = True) -> Access:
    return Access(timeline, timeline.time, span, writes, "an operation", None)


WHOLE = Span(0, 16)
COLUMN = Span(0, 13, ((4, 1), (4, 1)))
"""The first of four columns of a byte each."""


@pytest.mark.parametrize(
    ("one", "other", "meets"),
    [
        (WHOLE, Span(15, 20), True),
        (WHOLE, Span(16, 20), False),
        (COLUMN, Span(4, 5), False),
        (COLUMN, Span(12, 14), True),
        (COLUMN, Span(0, 1), True),
        (COLUMN, COLUMN, True),
        (COLUMN, Span(1, 14, ((4, 1), (4, 1))), False),
    ],
)
def test_bytes_meet_only_where_that_is_sure(one: Span, other: Span, meets: bool) -> None:
    assert one.meets(other) is meets
    assert other.meets(one) is meets


def test_who_waits_for_an_event_comes_after_what_was_before_it_and_no_more() -> None:
    rank = Timelines()
    side, history = rank.stream(""), History()
    before = access(rank.default, WHOLE)
    history.add(before)
    event = rank.record(rank.default)
    after = access(rank.default, WHOLE)
    side.wait(event)
    assert before.is_before(side)
    assert not after.is_before(side)


def test_waits_are_handed_on() -> None:
    """By a third stream, by the host, and by the communication stream of a group."""
    rank = Timelines()
    first, second, third = (rank.stream("") for _ in range(3))
    write = access(first, WHOLE)
    second.wait(rank.record(first))
    third.wait(rank.record(second))
    assert write.is_before(third)
    rank.block(rank.record(third))
    assert not write.is_before(rank.default)
    assert write.is_before(rank.launch(rank.default))
    group = rank.of_group("group", "group")
    assert group is rank.of_group("group", "group")
    group.wait(rank.record(rank.default))
    assert write.is_before(group)


def test_two_reads_need_no_order_and_a_write_needs_one_with_both() -> None:
    rank = Timelines()
    first, second = rank.stream(""), rank.stream("")
    history = History()
    assert history.add(access(first, WHOLE, writes=False)) is None
    assert history.add(access(second, WHOLE, writes=False)) is None
    rank.default.wait(rank.record(first))
    assert history.unordered(rank.default, ()) == [history.accesses[1]]
    assert history.unordered(rank.default, (second,)) == []
    broken = history.add(access(rank.default, WHOLE))
    assert broken is not None
    assert broken.timeline is second


def test_what_a_later_access_replaces_is_forgotten() -> None:
    rank, history = Timelines(), History()
    for number in range(100):
        history.add(access(rank.default, Span(number % 4, number % 4 + 1), writes=number % 2 == 0))
    assert [known.writes for known in history.accesses] == [True, False, True, False]
    history.add(access(rank.default, WHOLE))
    assert len(history.accesses) == 1


def test_of_very_many_accesses_the_writes_are_remembered() -> None:
    rank, history = Timelines(), History()
    history.add(access(rank.default, Span(0, 1000)))
    for number in range(1000):
        history.add(access(rank.default, Span(number, number + 1), writes=False))
    broken = history.add(access(rank.stream(""), WHOLE, writes=False))
    assert broken is history.accesses[0]
    assert len(history.accesses) < 100


def test_a_stream_that_waits_for_the_device_knows_all_streams() -> None:
    rank = Timelines()
    side = rank.stream("")
    write = access(side, WHOLE)
    rank.block_for_all()
    assert write.is_before(rank.launch(rank.default))
