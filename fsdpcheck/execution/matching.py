"""Which calls of different ranks belong together, and whether they agree. Pure data.

A *collective instance* is one numbered call on one group: (group name, its ranks, sequence). A rank is *absent*
from an instance until it issues the call. An instance is complete when every member issued it and all agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fsdpcheck.execution.trace import Collective

POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
"""A rank blocked in one is never part of a proof: its peer is not known here."""

LOCAL = POINT_TO_POINT | {"store.get"}
"""Waits that are no collective: they have no instance."""

_ONE_SIDED = {
    "gather": ("output dtype", "output shape"),
    "scatter": ("input dtype", "input shape"),
    "all_to_all": ("input shape", "output shape"),
}
"""Fields that only the root's call has, or that differ between members by right."""

Instance = tuple[str, tuple[int, ...], int]
Sides = Mapping[Instance, Mapping[int, Collective]]
"""Who issued what: by instance, then by rank. Instances come in the program order of the lowest rank in them."""


def instance(collective: Collective) -> Instance:
    """What the calls of all members have in common."""
    return collective.group_name, collective.group, collective.sequence


def differing(one: Collective, other: Collective) -> tuple[str, ...]:
    """Names of the fields in which two calls of one instance disagree; () when they match.

    Subjects are compared when both are known. When the operations differ, nothing else is named.
    """
    if one.op != other.op:
        return ("op",)
    ignored = _ONE_SIDED.get(one.op, ())
    mine, theirs = dict(_fields(one)), dict(_fields(other))
    names = [name for name in mine if name not in ignored and mine[name] != theirs[name]]
    subject = ["subject"] if one.subject and other.subject and one.subject != other.subject else []
    return tuple(names + subject)


def _fields(collective: Collective) -> Iterator[tuple[str, object]]:
    yield "reduce op", collective.reduce_op
    yield "root", collective.root
    for name, tensors in (("input", collective.inputs), ("output", collective.outputs)):
        yield f"{name} dtype", tuple(dtype for dtype, _ in tensors)
        yield f"{name} shape", tuple(shape for _, shape in tensors)


def match(traces: Mapping[int, Sequence[Collective]]) -> Sides:
    """Sort the calls of all ranks into instances."""
    sides: dict[Instance, dict[int, Collective]] = defaultdict(dict)
    for rank in sorted(traces):
        for collective in traces[rank]:
            if collective.op not in LOCAL:
                sides[instance(collective)].setdefault(rank, collective)
    return dict(sides)


def absent(key: Instance, sides: Sides) -> tuple[int, ...]:
    """Members that have not issued the call."""
    return tuple(rank for rank in key[1] if rank not in sides.get(key, {}))


def disagrees(calls: Mapping[int, Collective]) -> bool:
    """Whether the calls of one instance differ in anything that must agree."""
    first, *others = calls.values()
    subjects = {call.subject for call in calls.values() if call.subject}
    return len(subjects) > 1 or any(differing(first, other) for other in others)


def first_mismatch(sides: Sides) -> Instance | None:
    """The disagreeing instance that its lowest rank reached first; None when all calls agree."""
    return next((key for key, calls in sides.items() if len(calls) > 1 and disagrees(calls)), None)


def call_text(call: Collective, sides: Sides) -> str:
    """A call in words, with the name of its group where another group has the same ranks."""
    twins = any(name != call.group_name and ranks == call.group for name, ranks, _ in sides)
    return f"{call} (group {call.group_name!r})" if twins else str(call)


def mismatch_text(key: Instance, sides: Sides) -> str:
    """One finding with all sides, naming the fields that differ."""
    calls = sides[key]
    ordered = [calls[rank] for rank in sorted(calls)]
    pairs = [(one, other) for place, one in enumerate(ordered) for other in ordered[:place]]
    fields = dict.fromkeys(name for one, other in pairs for name in differing(one, other))
    into = any(name.startswith("output") for name in fields)
    ranks_by_call: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        ranks_by_call[f"{call_text(call, sides)}{_into(call) if into else ''}"].append(rank)
    head = f"mismatch: call #{key[2]} on ranks {list(key[1])} differs between its members in {', '.join(fields)}"
    return "\n".join([head] + [f"  {ranks_text(ranks)}: {call}" for call, ranks in ranks_by_call.items()])


def _into(call: Collective) -> str:
    return " into " + ", ".join(f"{dtype}{list(shape)}" for dtype, shape in call.outputs)


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, consecutive ones folded: "rank 3", "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(parts)}"
