"""Bytes and times of calls, by hand and against schedules that move them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fsdpcheck.execution.trace import Collective
from fsdpcheck.traces.cost import Link, Machine, payload, rows, share_and_rounds

FOUR = tuple(range(4))
SLOW = Machine(4, Link(1.0, 100.0), Link(10.0, 10.0))


def call(op: str, inputs: int, outputs: int = 0, group: tuple[int, ...] = FOUR, **more: object) -> Collective:
    """Of so many float32 numbers."""
    made = {"inputs": (("float32", (inputs,)),) * bool(inputs), "outputs": (("float32", (outputs,)),) * bool(outputs)}
    return Collective(op, group, "0", 0, **made, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "sent", "seconds"),
    [
        (call("all_reduce", 10, 10), 60, 6 + 0.6),
        (call("all_gather", 10), 120, 3 + 1.2),
        (call("reduce_scatter", 40), 120, 3 + 1.2),
        (call("all_to_all", 40, 40), 120, 3 + 1.2),
        (call("gather", 10), 120, 3 + 1.2),
        (call("scatter", 40), 120, 3 + 1.2),
        (call("scatter", 0, 10), 120, 3 + 1.2),
        (call("broadcast", 10), 40, 2 + 0.4),
        (call("broadcast", 0, 10), 40, 2 + 0.4),
        (call("reduce", 10, 10), 40, 2 + 0.4),
        (call("barrier", 0), 0, 2.0),
        (call("send", 10, group=(0, 1), tag=0), 40, 1 + 0.4),
        (call("recv", 0, 10, group=(1, 0), tag=0), 40, 1 + 0.4),
        (call("all_reduce", 10, 10, group=(2,)), 0, 0.0),
    ],
)
def test_a_call_costs_what_the_model_says(one: Collective, sent: int, seconds: float) -> None:
    (row,) = rows([one], SLOW)
    assert (row.op, row.calls, row.sent, row.spans) == (one.op, 1, sent, False)
    assert row.seconds == pytest.approx(seconds)


def test_between_nodes_the_other_link_counts_and_kinds_stand_apart() -> None:
    within, between = call("all_reduce", 10, 10), call("all_reduce", 10, 10, group=(0, 1, 2, 4))
    found = rows([within, between, within], SLOW)
    assert [(row.spans, row.calls, row.sent) for row in found] == [(True, 1, 60), (False, 2, 120)]
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


def test_phases_are_counted_and_types_have_their_sizes() -> None:
    one = Collective(
        "all_reduce", FOUR, "0", 0, inputs=(("bfloat16", (3, 2)), ("int64", ())), phase="forward of Net.fc"
    )
    assert payload(one) == 12 + 8
    (row,) = rows([one, one], SLOW)
    assert dict(row.phases) == {"forward": 2}
