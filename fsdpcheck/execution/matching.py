"""Which calls of different ranks belong together, and whether they agree. Pure data.

An *instance* is one numbered call on one group, or one numbered message from one rank to another under one tag. A rank
is *absent* from an instance until it issues the call. It is complete when every member issued it and all agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fsdpcheck.execution.trace import Collective

ANY_SOURCE = "recv_anysource"
"""A rank blocked in one is never part of a proof: its peer is not known."""

LOCAL = frozenset({ANY_SOURCE, "store.get"})
"""Waits that have no instance."""

MAKING = "new_group"
"""A group that is made, which holds its members as a collective does; it is part of no trace."""

_ONE_SIDED = {
    "gather": ("output dtype", "output shape"),
    "scatter": ("input dtype", "input shape"),
    "all_to_all": ("input shape", "output shape"),
}
"""Fields that only the root's call has, or that differ between members by right."""


class Instance(NamedTuple):
    """What the calls of all members have in common. ``tag``: of a message; None for a collective."""

    group_name: str
    members: tuple[int, ...]
    sequence: int
    tag: int | None = None

    @property
    def row(self) -> tuple[object, ...]:
        """What instances have in common that are numbered together."""
        return self.group_name, self.members, self.tag


Sides = Mapping[Instance, Mapping[int, Collective]]
"""Who issued what: by instance, then by rank. Instances come in the program order of the lowest rank in them."""


def instance(collective: Collective) -> Instance:
    """What the calls of all members have in common."""
    return Instance(collective.group_name, collective.group, collective.sequence, collective.tag)


def differing(one: Collective, other: Collective) -> tuple[str, ...]:
    """Names of the fields in which two calls of one instance disagree; () when they match.

    Subjects are compared when both are known. When the operations differ, nothing else is named.
    """
    if one.tag is not None and one.op != other.op:
        return _differing_message(one, other)
    if one.op != other.op:
        return ("op",)
    ignored = _ONE_SIDED.get(one.op, ())
    mine, theirs = dict(_fields(one)), dict(_fields(other))
    names = [name for name in mine if name not in ignored and mine[name] != theirs[name]]
    subject = ["subject"] if one.subject and other.subject and one.subject != other.subject else []
    return tuple(names + subject)


def _differing_message(one: Collective, other: Collective) -> tuple[str, ...]:
    """A message may be received in another shape than it was sent in; what else differs is garbled, or a crash."""
    mine, theirs = ([*one.inputs, *one.outputs], [*other.inputs, *other.outputs])
    names = []
    if [dtype for dtype, _ in mine] != [dtype for dtype, _ in theirs]:
        names.append("dtype")
    if [math.prod(shape) for _, shape in mine] != [math.prod(shape) for _, shape in theirs]:
        names.append("number of elements")
    return tuple(names)


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


def taken_from_anybody(traces: Mapping[int, Sequence[Collective]]) -> set[tuple[str, int | None]]:
    """(group name, tag) of messages that may have been received from any source: of which, is not known."""
    return {(call.group_name, call.tag) for trace in traces.values() for call in trace if call.op == ANY_SOURCE}


def absent(key: Instance, sides: Sides) -> tuple[int, ...]:
    """Members that have not issued the call."""
    return tuple(rank for rank in key.members if rank not in sides.get(key, {}))


def disagrees(calls: Mapping[int, Collective]) -> bool:
    """Whether the calls of one instance differ in anything that must agree."""
    first, *others = calls.values()
    subjects = {call.subject for call in calls.values() if call.subject}
    return len(subjects) > 1 or any(other != first and differing(first, other) for other in others)


def first_mismatch(sides: Sides) -> Instance | None:
    """The disagreeing instance that its lowest rank reached first; None when all calls agree."""
    return next((key for key, calls in sides.items() if len(calls) > 1 and disagrees(calls)), None)


def call_text(call: Collective, sides: Sides) -> str:
    """A call in words, with the name of its group where another group has the same ranks."""
    if call.op == MAKING:
        return str(call)
    names = {key.group_name for key in sides if key.members == call.group and not key.group_name.startswith(MAKING)}
    twins = bool(names - {call.group_name})
    return f"{call} (group {call.group_name!r})" if twins else str(call)


def mismatch_text(key: Instance, sides: Sides, placed: bool = False) -> str:
    """One finding with all sides, naming the fields that differ. ``placed``: with the line of each call."""
    calls = sides[key]
    ordered = [calls[rank] for rank in sorted(calls)]
    pairs = [(one, other) for place, one in enumerate(ordered) for other in ordered[:place]]
    fields = dict.fromkeys(name for one, other in pairs for name in differing(one, other))
    into = any(name.startswith("output") for name in fields)
    ranks_by_call: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        where = f" at {_place(call)}" if placed and call.where else ""
        ranks_by_call[f"{call_text(call, sides)}{_into(call) if into else ''}{where}"].append(rank)
    head = f"mismatch: {_subject(key)} differs between its members in {', '.join(fields)}"
    return "\n".join([head] + [f"  {ranks_text(ranks)}: {call}" for call, ranks in ranks_by_call.items()])


def missing_text(key: Instance, sides: Sides, ended: Mapping[int, str] | None = None, placed: bool = False) -> str:
    """Who never came to an instance, and how often to those before. ``ended``: what became of a rank that ended.

    ``placed``: with the lines of those who came."""
    who: dict[str, list[int]] = {}
    for rank in absent(key, sides):
        made = sum(1 for other in sides if other.row == key.row and rank in sides[other])
        what = f"call{'' if made == 1 else 's'} on this group"
        if key.tag is not None:
            what = f"{'sent' if rank == key.members[0] else 'received'} on this way under this tag"
        end = f"; {ended[rank]}" if ended and rank in ended else ""
        who.setdefault(f"{made} {what}{end}", []).append(rank)
    missing = ", ".join(f"{ranks_text(ranks)} ({made})" for made, ranks in who.items())
    verb = "called" if key.tag is None else "received" if key.members[0] in sides[key] else "sent"
    came = f"; {_lines(sides[key])}" if placed and any(call.where for call in sides[key].values()) else ""
    return f"missing: {call_text(min(sides[key].items())[1], sides)} was never {verb} by {missing}{came}"


def _lines(calls: Mapping[int, Collective]) -> str:
    ranks_by_line: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        ranks_by_line[_place(call)].append(rank)
    return ", ".join(f"{ranks_text(ranks)} did at {line}" for line, ranks in ranks_by_line.items())


def _place(call: Collective) -> str:
    """The line of a call, and the one that called the function it is in."""
    by = f", called at {call.called_at}" if call.called_at else ""
    return f"{call.where or 'an unknown line'}{by}"


def _subject(key: Instance) -> str:
    if key.tag is None:
        return f"call #{key.sequence} on ranks {list(key.members)}"
    source, destination = key.members
    return f"message #{key.sequence} from rank {source} to rank {destination}, tag {key.tag},"


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
