"""What the calls of one rank cost: how many, how many bytes through its link, and the time of an alpha-beta model.

A message of n bytes takes alpha + n * beta: a latency, and bytes over bandwidth. A collective of p members and n bytes
in all takes rounds * alpha + share * n * beta, with the least shares that are possible, those of rings and of recursive
halving: 2 (p - 1) / p for an all-reduce, (p - 1) / p where each member ends with a part or begins with one, 1 for a
broadcast. Rounds are those of a ring, p - 1 a pass, or of a tree, ceil(log2 p). Nothing overlaps.

Source: Hockney 1994, Parallel Computing 20(3); Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1), tables 1-3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal

from fsdpcheck.execution.trace import Collective

Rounds = Literal["ring", "tree"]

_PARTS: Final = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Calls whose members begin with a part of the n bytes, or end with one."""
_LOGARITHMIC: Final = frozenset({"broadcast", "reduce", "barrier", "monitored_barrier"})


@dataclass(frozen=True)
class Link:
    """``latency`` in seconds a message, ``bandwidth`` in bytes a second and direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """Ranks of one node are reached by ``within``, others by ``between``. ``per_node``: ranks of a node, in order."""

    per_node: int
    within: Link
    between: Link
    rounds: Rounds = "ring"

    def spans(self, ranks: Iterable[int]) -> bool:
        """Whether they are of several nodes."""
        return len({rank // self.per_node for rank in ranks}) > 1


@dataclass
class Row:
    """Calls of one kind: the same operation among as many members. ``moved``: bytes through the busiest of their links,
    in one direction; a message counts at its sender and at its receiver.

    ``phases``: how many were made in the forward, the backward, the step of the optimizer; "" where that is unknown.
    """

    op: str
    members: int
    spans: bool
    calls: int = 0
    moved: int = 0
    seconds: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)


def rows(calls: Iterable[tuple[Collective, int]], machine: Machine) -> list[Row]:
    """What calls cost, each with the bytes that it is about in all, by kind; the dearest first."""
    found: dict[tuple[str, int, bool], Row] = {}
    for call, payload in calls:
        members = 2 if call.tag is not None else len(call.group)
        spans = machine.spans(call.group)
        row = found.setdefault((call.op, members, spans), Row(call.op, members, spans))
        share, rounds = share_and_rounds(call.op, members, machine.rounds)
        moved = share * payload
        link = machine.between if spans else machine.within
        row.calls += 1
        row.moved += math.ceil(moved)
        row.seconds += rounds * link.latency + float(moved) / link.bandwidth
        row.phases[call.phase.partition(" ")[0]] += 1
    return sorted(found.values(), key=lambda row: (-row.seconds, row.op, row.members))


def share_and_rounds(op: str, members: int, rounds: Rounds) -> tuple[Fraction, int]:
    """(the share of its bytes that passes a member's link, how many latencies)."""
    if members == 1:
        return Fraction(0), 0
    doubling = math.ceil(math.log2(members))
    a_pass = members - 1 if rounds == "ring" else doubling
    if op == "all_reduce":
        return Fraction(2 * (members - 1), members), 2 * a_pass
    if op in _PARTS:
        return Fraction(members - 1, members), a_pass
    return Fraction(1), doubling if op in _LOGARITHMIC else 1
