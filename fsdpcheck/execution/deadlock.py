"""Wait-for analysis: who waits for whom, in which collective, and whether anybody can still move. Pure data in and out.

The semantics are rendezvous: members of a collective go on when all have come with calls that agree
(execution/matching.py). That is stronger than some backends; a hang that a buffering backend may get past is called
unsafe, not a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from fsdpcheck.execution import Failure, FailureKind, RankState
from fsdpcheck.execution.matching import (
    LOCAL,
    POINT_TO_POINT,
    Instance,
    Sides,
    absent,
    call_text,
    disagrees,
    first_mismatch,
    instance,
    match,
    mismatch_text,
    ranks_text,
)
from fsdpcheck.execution.trace import Collective

LEAVES_EARLY = {"broadcast": "root", "scatter": "root", "gather": "others", "reduce": "others"}
"""Who may return before the other members come, on a backend that buffers."""


@dataclass(frozen=True, slots=True)
class Running:
    """Outside any collective, or not seen to be in one."""

    rank: int
    where: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocked:
    """In a call that has not returned (or waiting for an asynchronous one). ``where`` is file:line of the caller."""

    rank: int
    collective: Collective
    where: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Came to the end of its program."""

    rank: int


@dataclass(frozen=True, slots=True)
class Raised:
    """Ended by an exception: ``exception`` its type name, ``text`` its traceback, ``message`` its first line."""

    rank: int
    text: str
    exception: str = ""
    where: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """Left by sys.exit or os._exit with this code."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Killed: ``signal`` is the signal's name."""

    rank: int
    signal: str


State = Running | Blocked | Finished | Raised | Exited | Lost


def nobody_can_move(states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]] | None = None) -> bool:
    """Whether every rank has ended or is blocked in an incomplete instance, and at least one is blocked.

    ``traces``: calls issued so far by rank; they make calls in flight (issued, not waited for) count as present.
    The states must be one consistent snapshot. Guarantee: under rendezvous semantics no rank ever moves again.
    """
    sides = _issued(states, traces)
    blocked = [state for state in states.values() if isinstance(state, Blocked)]
    if not blocked or any(isinstance(state, Running) for state in states.values()):
        return False
    return all(_is_stuck(state.collective, sides) for state in blocked)


def explain(
    states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]] | None = None, seconds: float | None = None
) -> Failure:
    """The one failure that these states are: mismatch, else lost, exited, raised, else deadlock or unsafe.

    A rank that is blocked because of another's end is named as waiting, not as a second failure. "unsafe" is a hang
    that a buffering backend may get past. ``seconds``: time from the last possible move, kept for hangs.
    """
    sides = _issued(states, traces)
    kind, headline, exception = _verdict(states, sides)
    lines = [headline, *_rank_lines(states, sides), *_missing_lines(states, sides), *_ring_line(states, sides)]
    if kind in ("raised", "mismatch"):
        lines += [f"rank {state.rank} raised:\n{state.text.rstrip()}" for state in _first_of_each_exception(states)]
    ranks = tuple(_rank_state(states[rank], sides) for rank in sorted(states))
    return Failure(kind, "\n".join(lines), ranks, exception, seconds if kind in _HANGS else None)


def analyse(traces: Mapping[int, Sequence[Collective]]) -> Failure | None:
    """What is wrong with the calls of a run that *completed*; None when every legal schedule completes as well.

    Finds calls that disagree (many backends let them pass), calls that some member never made, and orders across groups
    that are a ring: a hang for any backend that holds members until all have come.
    """
    sides = match(traces)
    ranks = tuple(RankState(rank, "finished") for rank in sorted(traces))
    if (found := first_mismatch(sides)) is not None:
        return Failure("mismatch", mismatch_text(found, sides), ranks)
    if unmatched := [key for key in sides if absent(key, sides)]:
        head = "unsafe: a call was never matched; a backend that waits for all members hangs"
        return Failure("unsafe", "\n".join([head, *(f"  {_missing_line(key, sides, {})}" for key in unmatched)]), ranks)
    order = _program_order(traces)
    if nx.is_directed_acyclic_graph(order):
        return None
    return Failure("unsafe", _order_text(order, sides), ranks)


_HANGS = ("deadlock", "mismatch", "unsafe")


def _issued(states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]] | None) -> Sides:
    blocked = {rank: (state.collective,) for rank, state in states.items() if isinstance(state, Blocked)}
    known = traces or {}
    return match({rank: (*known.get(rank, ()), *blocked.get(rank, ())) for rank in {*known, *blocked}})


def _is_stuck(collective: Collective, sides: Sides) -> bool:
    if collective.op in LOCAL:
        return collective.op not in POINT_TO_POINT
    key = instance(collective)
    return bool(absent(key, sides)) or disagrees(sides[key])


def _verdict(states: Mapping[int, State], sides: Sides) -> tuple[FailureKind, str, str]:
    ordered = [states[rank] for rank in sorted(states)]
    if (found := first_mismatch(sides)) is not None:
        return "mismatch", mismatch_text(found, sides), ""
    if lost := [state for state in ordered if isinstance(state, Lost)]:
        return "lost", f"rank {lost[0].rank} was lost: killed by {lost[0].signal}", ""
    if left := [state for state in ordered if isinstance(state, Exited)]:
        return "exited", f"rank {left[0].rank} left with exit code {left[0].code} in the middle of a run", ""
    if raised := [state for state in ordered if isinstance(state, Raised)]:
        name = raised[0].exception
        same = ranks_text(state.rank for state in raised if state.exception == name)
        return "raised", f"{same} raised {name or 'an exception'}", name
    if _hopeless(states, sides):
        return "deadlock", f"deadlock: no rank can move (W = {len(states)})", ""
    return "unsafe", f"unsafe: no rank can move unless the backend buffers (W = {len(states)})", ""


def _hopeless(states: Mapping[int, State], sides: Sides) -> set[int]:
    """Blocked ranks that no buffering frees: the absent members they wait for cannot all come."""
    blocked = {rank: state for rank, state in states.items() if isinstance(state, Blocked)}
    may_move = {rank for rank, state in states.items() if isinstance(state, Running) or _leaves_early(state)}
    while True:
        waits = set(blocked) - may_move
        freed = {rank for rank in waits if _may_be_freed(blocked[rank].collective, may_move, sides)}
        if not freed:
            return waits
        may_move |= freed


def _may_be_freed(collective: Collective, may_move: set[int], sides: Sides) -> bool:
    if collective.op in LOCAL:
        return bool(may_move)
    return may_move.issuperset(absent(instance(collective), sides))


def _leaves_early(state: State) -> bool:
    if not isinstance(state, Blocked):
        return False
    who = LEAVES_EARLY.get(state.collective.op)
    return who is not None and (who == "root") == (state.rank == state.collective.root)


def _rank_lines(states: Mapping[int, State], sides: Sides) -> list[str]:
    ranks_by_line: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(states):
        ranks_by_line[_describe(states[rank], sides)].append(rank)
    return [f"  {ranks_text(ranks)}: {line}" for line, ranks in ranks_by_line.items()]


def _describe(state: State, sides: Sides) -> str:
    where = f", at {state.where}" if isinstance(state, Running | Blocked | Raised) and state.where else ""
    match state:
        case Running():
            return f"running{where}"
        case Blocked():
            return f"in {call_text(state.collective, sides)}, {_waits_for(state.collective, sides)}{where}"
        case Finished():
            return "finished"
        case Raised():
            return f"raised {state.message or state.exception or 'an exception'}{where}"
        case Exited():
            return f"exited with code {state.code}"
        case Lost():
            return f"killed by {state.signal}"


def _waits_for(collective: Collective, sides: Sides) -> str:
    if collective.op in LOCAL:
        return "waiting for another rank to act"
    missing = absent(instance(collective), sides)
    return f"waiting for {ranks_text(missing)}" if missing else "all members present"


def _missing_lines(states: Mapping[int, State], sides: Sides) -> list[str]:
    waited = {instance(state.collective) for state in states.values() if isinstance(state, Blocked)}
    return [f"  {_missing_line(key, sides, states)}" for key in sides if key in waited and absent(key, sides)]


def _missing_line(key: Instance, sides: Sides, states: Mapping[int, State]) -> str:
    who: dict[str, list[int]] = {}
    for rank in absent(key, sides):
        made = sum(1 for other in sides if other[:2] == key[:2] and rank in sides[other])
        state = states.get(rank)
        ended = "" if state is None or isinstance(state, Running | Blocked) else f"; {_name(state)}"
        who.setdefault(f"{made} call{'' if made == 1 else 's'} on this group{ended}", []).append(rank)
    missing = ", ".join(f"{ranks_text(ranks)} ({made})" for made, ranks in who.items())
    return f"missing: {call_text(min(sides[key].items())[1], sides)} was never called by {missing}"


def _name(state: State) -> str:
    return type(state).__name__.lower()


def _ring_line(states: Mapping[int, State], sides: Sides) -> list[str]:
    """The story of a deadlock across groups: ranks that wait for one another in a ring."""
    graph = nx.DiGraph()
    for rank, state in sorted(states.items()):
        if isinstance(state, Blocked) and state.collective.op not in LOCAL:
            others = absent(instance(state.collective), sides)
            graph.add_edges_from((rank, other) for other in others if isinstance(states.get(other), Blocked))
    ring = _ring(graph)
    return ["  ring: " + " waits for ".join(f"rank {rank}" for rank in [*ring, ring[0]])] if ring else []


def _ring(graph: Any) -> list[Any]:
    try:
        return [edge[0] for edge in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        return []


def _program_order(traces: Mapping[int, Sequence[Collective]]) -> Any:
    """Graph of instances: an edge from each blocking call to the calls behind it, up to the next blocking one."""
    graph = nx.DiGraph()
    for trace in traces.values():
        previous: Instance | None = None
        for collective in (call for call in trace if call.op not in LOCAL):
            if previous is not None:
                graph.add_edge(previous, instance(collective))
            if not collective.asynchronous:
                previous = instance(collective)
    return graph


def _order_text(order: Any, sides: Sides) -> str:
    head = "unsafe: calls on several groups come in different orders; a backend that waits for all members hangs"
    lines = [f"  {call_text(min(sides[key].items())[1], sides)} comes before" for key in _ring(order)]
    return "\n".join([head, *lines, "  the first again"])


def _first_of_each_exception(states: Mapping[int, State]) -> list[Raised]:
    first: dict[str, Raised] = {}
    for _, state in sorted(states.items()):
        if isinstance(state, Raised):
            first.setdefault(state.exception, state)
    return list(first.values())


def _rank_state(state: State, sides: Sides) -> RankState:
    name = _name(state)
    match state:
        case Blocked():
            return RankState(state.rank, name, str(state.collective), state.where, state.stack)
        case Running():
            return RankState(state.rank, name, "", state.where, state.stack)
        case Raised():
            return RankState(state.rank, name, "", state.where, tuple(state.text.splitlines()))
        case _:
            return RankState(state.rank, _describe(state, sides))
