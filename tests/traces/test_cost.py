"""Bytes and times of calls, by hand and against schedules that move them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fsdpcheck.execution.trace import Collective
from fsdpcheck.traces.cost import Link, Machine, rows, share_and_rounds

FOUR = tuple(range(4))
SLOW = Machine(4, Link(1.0, 100.0), Link(10.0, 10.0))


def call(op: str, group: tuple[int, ...] = FOUR, **more: object) -> Collective:
    return Collective(op, group, "0", 0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "payload", "moved", "seconds"),
    [
        (call("all_reduce"), 40, 60, 6 + 0.6),
        (call("all_gather"), 160, 120, 3 + 1.2),
        (call("reduce_scatter"), 160, 120, 3 + 1.2),
        (call("all_to_all"), 160, 120, 3 + 1.2),
        (call("gather"), 160, 120, 3 + 1.2),
        (call("scatter"), 160, 120, 3 + 1.2),
        (call("broadcast"), 40, 40, 2 + 0.4),
        (call("reduce"), 40, 40, 2 + 0.4),
        (call("barrier"), 0, 0, 2.0),
        (call("send", (0, 1), tag=0), 40, 40, 1 + 0.4),
        (call("recv", (1, 0), tag=0), 40, 40, 1 + 0.4),
        (call("all_reduce", (2,)), 40, 0, 0.0),
    ],
)
def test_a_call_costs_what_the_model_says(one: Collective, payload: int, moved: int, seconds: float) -> None:
    (row,) = rows([(one, payload)], SLOW)
    assert (row.op, row.calls, row.moved, row.spans) == (one.op, 1, moved, False)
    assert row.seconds == pytest.approx(seconds)


def test_between_nodes_the_other_link_counts_and_kinds_stand_apart() -> None:
    within, between = (call("all_reduce"), 40), (call("all_reduce", (0, 1, 2, 4)), 40)
    found = rows([within, between, within], SLOW)
    assert [(row.spans, row.calls, row.moved) for row in found] == [(True, 1, 60), (False, 2, 120)]
    assert found[0].seconds == pytest.approx(6 * 10 + 6)


def test_a_tree_has_fewer_rounds() -> None:
    assert share_and_rounds("all_reduce", 4096, "ring") == (Fraction(2 * 4095, 4096), 2 * 4095)
    assert share_and_rounds("all_reduce", 4096, "tree") == (Fraction(2 * 4095, 4096), 24)
    assert share_and_rounds("all_gather", 5, "tree") == (Fraction(4, 5), 3)


@pytest.mark.parametrize("members", [2, 3, 4, 8, 12])
def test_the_shares_are_those_of_a_ring_that_is_played(members: int) -> None:
    """Each member sends a part on to the next until all have all, and before that adds it up on its way."""
    has, sent = [{part} for part in range(members)], [0] * members
    rounds = 0
    while any(len(parts) < members for parts in has):
        rounds += 1
        for member in range(members):
            has[(member + 1) % members] |= {(member - rounds + 1) % members}
            sent[member] += 1
    assert (Fraction(sent[0], members), rounds) == share_and_rounds("all_gather", members, "ring")
    assert (Fraction(2 * sent[0], members), 2 * rounds) == share_and_rounds("all_reduce", members, "ring")


def test_phases_are_counted() -> None:
    (row,) = rows([(call("all_reduce", phase=phase), 4) for phase in ("forward of Net.fc", "forward of Net", "")], SLOW)
    assert dict(row.phases) == {"forward": 2, "": 1}
