"""Flight-Recorder dumps of all ranks of a real job, on NCCL or gloo, as a Job.

What dumps do not hold is neither made up nor judged, and is said in the job's notes: ranks without a dump, calls that
the ring buffer has dropped, and on gloo the members of groups, messages, and which calls block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.execution.deadlock import Blocked, Running, State
from fsdpcheck.execution.matching import absent, instance, match, ranks_text
from fsdpcheck.execution.trace import Collective, Trace
from fsdpcheck.traces.entries import GLOO, Dump, Entry, in_parts
from fsdpcheck.traces.job import Job

_WORLD: Final = "default_pg"
"""What torch describes the group of all ranks as."""
_MOST_RANKS: Final = 1 << 20
"""More than any job has: a larger number is no rank's."""
_OF_GLOO: Final = (
    "gloo's recorder holds no messages, not whether a call failed, and not which calls block: "
    "orders across groups are judged by calls under way"
)


def job(dumps: Sequence[Dump]) -> Job:
    """What the dumps of a job, one a rank at most, say of it."""
    known = {dump.rank: dump for dump in dumps}
    members = _Members(known)
    cut = [rank for rank, dump in known.items() if dump.is_cut]
    calls = {rank: list(_Calls(dump, members, bool(cut))) for rank, dump in known.items()}
    traces: dict[int, Trace] = {rank: tuple(call for call, _ in made) for rank, made in calls.items()}
    states: dict[int, State] = {}
    for rank, made in calls.items():
        stands_in = next((call for call, done in made if not done), None)
        states[rank] = Running(rank) if stands_in is None else Blocked(rank, stands_in, stands_in.where)
    on_gloo = any(entry.backend == GLOO for dump in dumps for entry in dump.entries)
    return Job(
        members.world_size,
        traces,
        states,
        assumed=_assumed(calls, cut),
        in_order=not on_gloo,
        notes=(
            *_missing(known, members.world_size),
            *_cut(known),
            *members.notes(),
            *([_OF_GLOO] if on_gloo and not all(dump.is_simulated for dump in dumps) else ()),
        ),
    )


class _Members:
    """Who is in which group: as the dumps say, else as calls show."""

    def __init__(self, known: Mapping[int, Dump]) -> None:
        self._known = known
        self._said: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._calls: dict[str, dict[int, dict[int, bool]]] = defaultdict(lambda: defaultdict(dict))
        whole = 0
        for rank, dump in known.items():
            for name, ranks in dump.groups.items():
                self._said[name].add(ranks)
            for entry in dump.entries:
                self._calls[entry.group][entry.number][rank] = entry.done
                whole = max(whole, _size(entry) if entry.description == _WORLD else 0)
        said = (rank for groups in self._said.values() for ranks in groups for rank in ranks)
        self.world_size = max(whole, 1 + max([*known, *said]))
        if self.world_size > _MOST_RANKS:
            raise Unreadable(f"the dumps tell of {self.world_size} ranks, wanted {_MOST_RANKS} at most")
        self._inferred: dict[str, tuple[int, ...]] = {}

    def of(self, rank: int, entry: Entry) -> tuple[int, ...]:
        """Global ranks of the group of a call, by their rank in it."""
        own = self._known[rank].groups.get(entry.group)
        if said := own or next((ranks for ranks in self._said[entry.group] if rank in ranks), None):
            return said
        if entry.description == _WORLD:
            return tuple(range(self.world_size))
        if entry.group not in self._inferred:
            self._inferred[entry.group] = self._by_calls(entry.group)
        return self._inferred[entry.group]

    def _callers(self, name: str) -> set[int]:
        return {rank for ranks in self._calls[name].values() for rank in ranks}

    def _by_calls(self, name: str) -> tuple[int, ...]:
        """Those who called; and all others, where all who ever called came to a call and none got through it."""
        callers = self._callers(name)
        lacks = any(len(done) == len(callers) and not any(done.values()) for done in self._calls[name].values())
        return tuple(range(self.world_size)) if lacks else tuple(sorted(callers))

    def notes(self) -> Iterator[str]:
        """Which members are not said, and who is taken for them."""
        for name, ranks in self._inferred.items():
            callers = self._callers(name)
            others = ranks_text(set(ranks) - callers) if set(ranks) - callers else ""
            yield (
                f"the dumps do not say who is in group {name!r}: taken are those who called it, {ranks_text(callers)}"
                f"{f', and {others}, as a call did not end to which all of them had come' if others else ''}; "
                f"{'not all of these need be' if others else 'a member that never called is not missed'}"
            )


def _size(entry: Entry) -> int:
    """How many ranks a group has, by what one of them gathers from all or deals out to all; 0 where that tells none."""
    gathers = entry.op in ("all_gather", "gather")
    large, small = (entry.outputs, entry.inputs) if gathers else (entry.inputs, entry.outputs)
    if not (gathers or entry.op in ("reduce_scatter", "scatter")) or len(large) != 1 or len(small) != 1:
        return 0
    return math.prod(large[0][1]) // max(math.prod(small[0][1]), 1)


class _Calls:
    """The calls of one rank, in its order, each with whether it came to its end."""

    def __init__(self, dump: Dump, members: _Members, cut: bool) -> None:
        self._dump, self._members, self._cut = dump, members, cut
        self._sent: dict[tuple[object, ...], int] = defaultdict(int)

    def __iter__(self) -> Iterator[tuple[Collective, bool]]:
        launches: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
        for entry in self._dump.entries:
            launches[entry.group, entry.is_message, entry.batch if entry.is_message else entry.number].append(entry)
        made: list[tuple[Collective, bool]] = []
        for those in launches.values():
            if self._dump.is_cut and those[0] is self._dump.entries[0] and (len(those) > 1 or those[0].ends):
                continue  # some of them have been dropped
            ranks = self._members.of(self._dump.rank, those[0])
            made += self._messages(those, ranks) if those[0].is_message else [_collective(those, ranks)]
        return iter(_in_order(made))

    def _messages(self, those: Sequence[Entry], ranks: tuple[int, ...]) -> Iterator[tuple[Collective, bool]]:
        """Each of a batch. Where the first have been dropped, those that are under way are counted, without sizes."""
        done = _done(those)
        for entry in those:
            if entry.way is None or (self._cut and done):
                continue
            if max(entry.way) >= len(ranks):
                got = f"record {entry.record} of rank {self._dump.rank} is a message of member {max(entry.way)}"
                raise Unreadable(f"{got}, but group {entry.group!r} has {len(ranks)}")
            way = ranks[entry.way[0]], ranks[entry.way[1]]
            row = (entry.op, entry.group, way)
            self._sent[row] += 1
            call = Collective(
                entry.op, way, entry.group, self._sent[row] - 1, asynchronous=True, tag=0, where=entry.where,
                inputs=() if self._cut or entry.op != "send" else entry.inputs,
                outputs=() if self._cut or entry.op == "send" else entry.outputs,
            )  # fmt: skip
            yield call, done


def _collective(those: Sequence[Entry], ranks: tuple[int, ...]) -> tuple[Collective, bool]:
    """Calls launched as one are one. What several of them move is not compared where each rank has its own part."""
    ops = dict.fromkeys(entry.op for entry in those if not entry.ends) or {those[0].op: None}
    packed = [in_parts(entry, len(ranks)) for entry in those]
    uneven = len(those) > 1 and {"broadcast", "reduce"} & ops.keys()
    inputs, outputs = (() if uneven else tuple(one for pair in packed for one in pair[side]) for side in (0, 1))
    call = Collective(
        " and ".join(ops), ranks, those[0].group, those[0].number, inputs=inputs, outputs=outputs, asynchronous=True,
        where=those[0].where,
    )  # fmt: skip
    return call, _done(those)


def _in_order(made: Sequence[tuple[Collective, bool]]) -> list[tuple[Collective, bool]]:
    """What a group did before a call that ended has ended too, even where its recorder does not say so."""
    later: set[tuple[object, ...]] = set()
    found = []
    for call, done in reversed(made):
        row = call.group_name, call.group, call.tag
        found.append((call, done or row in later))
        later |= {row} if done else set()
    return found[::-1]


def _done(those: Sequence[Entry]) -> bool:
    """Of calls launched as one only the last entry, which stands for them all, knows."""
    return those[-1].done


def _assumed(calls: Mapping[int, Sequence[tuple[Collective, bool]]], cut: Sequence[int]) -> dict[int, Trace]:
    """Calls that ranks without a dump, or before what is left of it, may have made as the others did.

    A rank whose dump has lost its beginning has made all calls of a group before the first that is left; where none is
    left, those that somebody got through.
    """
    begins: dict[tuple[int, str, tuple[int, ...]], int] = {}
    for rank in cut:
        for call, _ in calls[rank]:
            begins.setdefault((rank, call.group_name, call.group), call.sequence)
    ended = {instance(call) for made in calls.values() for call, done in made if done}
    found: dict[int, list[Collective]] = defaultdict(list)
    sides = match({rank: [call for call, _ in made] for rank, made in calls.items()})
    for key, there in sides.items():
        for rank in absent(key, sides):
            begin = begins.get((rank, key.group_name, key.members))
            lost = key in ended if begin is None else key.sequence < begin
            if rank not in calls or (rank in cut and key.tag is None and lost):
                found[rank].append(replace(next(iter(there.values())), where=""))
    return {rank: tuple(those) for rank, those in found.items()}


def _missing(known: Mapping[int, Dump], world_size: int) -> Iterator[str]:
    if missing := [rank for rank in range(world_size) if rank not in known]:
        yield (
            f"there is no dump of {ranks_text(missing)}: lost with its process, or left elsewhere; "
            f"it is taken to have made each call that others made"
        )


def _cut(known: Mapping[int, Dump]) -> Iterator[str]:
    """Which dumps lack their beginning, by where they begin."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, dump in known.items():
        if dump.is_cut:
            ranks[dump.entries[0].record].append(rank)
    for record, those in sorted(ranks.items()):
        yield (
            f"the ring buffer of {ranks_text(those)} begins with record {record}: calls are lined up by "
            f"collective_seq_id, what came before is not judged, and of messages only those under way are"
        )
