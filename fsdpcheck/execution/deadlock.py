"""Wait-for analysis: who waits for whom, in which collective, and whether anybody can still move. Pure data in and out.

The semantics are rendezvous: members of a collective go on when all have come with calls that agree
(execution/matching.py). That is stronger than some backends; a hang that a buffering backend may get past is called
unsafe, not a deadlock.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import networkx as nx

from fsdpcheck.execution import Failure, FailureKind, RankState, orders
from fsdpcheck.execution.matching import (
    ANY_SOURCE,
    LOCAL,
    Sides,
    absent,
    call_text,
    disagrees,
    first_mismatch,
    instance,
    match,
    mismatch_text,
    missing_text,
    ranks_text,
    taken_from_anybody,
)
from fsdpcheck.execution.trace import Collective, Times

LEAVES_EARLY = {"broadcast": "root", "scatter": "root", "gather": "others", "reduce": "others", "send": "any"}
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
    """Left by sys.exit or os._exit with this code. ``where``: file:line of the innermost frame of its own code."""

    rank: int
    code: int
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Lost:
    """Killed: ``signal`` is the signal's name."""

    rank: int
    signal: str


State = Running | Blocked | Finished | Raised | Exited | Lost


def lost(rank: int, code: int) -> Lost:
    """The state of a rank that a signal has ended, of whose process that is the exit code: less than 0."""
    known = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
    return Lost(rank, known.get(-code, f"signal {-code}"))


def nobody_can_move(states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]] | None = None) -> bool:
    """Whether every rank has ended or is blocked in an incomplete instance, and at least one is blocked.

    ``traces``: calls issued so far by rank; they make calls in flight (issued, not waited for) count as present.
    The states must be one consistent snapshot. Guarantee: under rendezvous semantics no rank ever moves again.
    """
    sides, taken = _issued(states, traces), taken_from_anybody(traces or {})
    blocked = [state for state in states.values() if isinstance(state, Blocked)]
    if not blocked or any(isinstance(state, Running) for state in states.values()):
        return False
    return all(_is_stuck(state.collective, sides, taken) for state in blocked)


def explain(
    states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]] | None = None, seconds: float | None = None
) -> Failure:
    """The one failure that these states are: mismatch, else lost, exited, raised, else deadlock or unsafe.

    A rank that is blocked because of another's end is named as waiting, not as a second failure. "unsafe" is a hang
    that a buffering backend may get past. ``seconds``: time from the last possible move, kept for hangs.
    """
    sides = _issued(states, traces)
    kind, headline, exception = _verdict(states, sides)
    lines = [headline, *rank_lines(states, sides), *_missing_lines(states, sides), *_ring_line(states, sides)]
    if kind in ("raised", "mismatch"):
        lines += [f"rank {state.rank} raised:\n{state.text.rstrip()}" for state in _first_of_each_exception(states)]
    ranks = rank_states(states, sides)
    return Failure(kind, "\n".join(lines), ranks, exception, seconds if kind in _HANGS else None)


def analyse(
    traces: Mapping[int, Sequence[Collective]], times: Mapping[int, Times] | None = None, *, ordered: bool = True
) -> Failure | None:
    """What is wrong with the calls of a run that *completed*; None when every legal schedule completes as well.

    Finds calls that disagree (many backends let them pass), calls that some member never made, and orders across groups
    that are a ring: a hang for any backend that holds members until all have come. ``times``: see orders.ring.
    ``ordered``: whether a rank's calls come one after another; where several threads make them, order demands nothing.
    """
    sides = match(traces)
    ranks = tuple(RankState(rank, "finished") for rank in sorted(traces))
    if (found := first_mismatch(sides)) is not None:
        return Failure("mismatch", mismatch_text(found, sides, placed=True), ranks)
    taken = taken_from_anybody(traces)
    if unmatched := [key for key in sides if absent(key, sides) and (key.group_name, key.tag) not in taken]:
        head = "unsafe: a call was never matched; a backend that waits for all members hangs"
        lines = (f"  {missing_text(key, sides, placed=True)}" for key in unmatched)
        return Failure("unsafe", "\n".join([head, *lines]), ranks)
    demands = orders.ring(traces, times) if ordered else ()
    return Failure("unsafe", orders.text(orders.AS_WAITED_FOR, demands, sides), ranks) if demands else None


_HANGS = ("deadlock", "mismatch", "unsafe")
AT_ONCE: Final = "every rank left with exit code {code} before it met another"
"""How a report begins of a program that ends itself, as for arguments that it does not know."""


def _issued(states: Mapping[int, State], traces: Mapping[int, Sequence[Collective]] | None) -> Sides:
    blocked = {rank: (state.collective,) for rank, state in states.items() if isinstance(state, Blocked)}
    known = traces or {}
    return match({rank: (*known.get(rank, ()), *blocked.get(rank, ())) for rank in {*known, *blocked}})


def _is_stuck(collective: Collective, sides: Sides, taken: set[tuple[str, int | None]]) -> bool:
    if collective.op in LOCAL:
        return collective.op != ANY_SOURCE
    key = instance(collective)
    if (key.group_name, key.tag) in taken:
        return False
    return bool(absent(key, sides)) or disagrees(sides[key])


def _verdict(states: Mapping[int, State], sides: Sides) -> tuple[FailureKind, str, str]:
    ordered = [states[rank] for rank in sorted(states)]
    if (found := first_mismatch(sides)) is not None:
        return "mismatch", mismatch_text(found, sides), ""
    if lost := [state for state in ordered if isinstance(state, Lost)]:
        return "lost", f"rank {lost[0].rank} was lost: killed by {lost[0].signal}", ""
    if not sides and (code := _one_code(states)) is not None:
        return "exited", AT_ONCE.format(code=code), ""
    if left := [state for state in ordered if isinstance(state, Exited)]:
        return "exited", f"rank {left[0].rank} left with exit code {left[0].code} in the middle of a run", ""
    if raised := [state for state in ordered if isinstance(state, Raised)]:
        name = raised[0].exception
        same = ranks_text(state.rank for state in raised if state.exception == name)
        return "raised", f"{same} raised {name or 'an exception'}", name
    if _hopeless(states, sides):
        return "deadlock", f"deadlock: no rank can move (W = {len(states)})", ""
    return "unsafe", f"unsafe: no rank can move unless the backend buffers (W = {len(states)})", ""


def _one_code(states: Mapping[int, State]) -> int | None:
    """The code with which all ranks left by themselves, if it is one; None otherwise."""
    codes = {state.code if isinstance(state, Exited) else None for state in states.values()}
    return codes.pop() if len(codes) == 1 else None


def _hopeless(states: Mapping[int, State], sides: Sides) -> set[int]:
    """Blocked ranks that no buffering frees: the absent members they wait for cannot all come."""
    blocked = {rank: state for rank, state in states.items() if isinstance(state, Blocked)}
    may_move = {rank for rank, state in blocked.items() if leaves_early(rank, state.collective)}
    may_move |= {rank for rank, state in states.items() if isinstance(state, Running)}
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


def leaves_early(rank: int, collective: Collective) -> bool:
    """Whether this rank may return from the call before the others come, on a backend that buffers."""
    who = LEAVES_EARLY.get(collective.op)
    return who == "any" or (who is not None and (who == "root") == (rank == collective.root))


def rank_lines(states: Mapping[int, State], sides: Sides) -> list[str]:
    """Where each rank stands, in words; those that stand alike in one line."""
    ranks_by_line: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(states):
        ranks_by_line[_describe(states[rank], sides)].append(rank)
    return [f"  {ranks_text(ranks)}: {line}" for line, ranks in ranks_by_line.items()]


def _describe(state: State, sides: Sides) -> str:
    where = f", at {state.where}" if isinstance(state, Running | Blocked | Raised | Exited) and state.where else ""
    match state:
        case Running():
            return f"running{where}"
        case Blocked():
            asked = state.collective.where
            of = f", called from {asked}" if asked and asked != state.where else ""
            of += f", called at {by}" if (by := state.collective.called_at) else ""
            return f"in {call_text(state.collective, sides)}, {_waits_for(state.collective, sides)}{where}{of}"
        case Finished():
            return "finished"
        case Raised():
            return f"raised {state.message or state.exception or 'an exception'}{where}"
        case Exited():
            return f"exited with code {state.code}{where}"
        case Lost():
            return f"killed by {state.signal}"


def _waits_for(collective: Collective, sides: Sides) -> str:
    if collective.op in LOCAL:
        return "waiting for another rank to act"
    missing = absent(instance(collective), sides)
    return f"waiting for {ranks_text(missing)}" if missing else "all members present"


def _missing_lines(states: Mapping[int, State], sides: Sides) -> list[str]:
    waited = {instance(state.collective) for state in states.values() if isinstance(state, Blocked)}
    ended = {rank: _name(state) for rank, state in states.items() if not isinstance(state, Running | Blocked)}
    return [f"  {missing_text(key, sides, ended)}" for key in sides if key in waited and absent(key, sides)]


def _name(state: State) -> str:
    return type(state).__name__.lower()


def _ring_line(states: Mapping[int, State], sides: Sides) -> list[str]:
    """The story of a deadlock across groups: ranks that wait for one another in a ring."""
    graph = nx.DiGraph()
    for rank, state in sorted(states.items()):
        if isinstance(state, Blocked) and state.collective.op not in LOCAL:
            others = absent(instance(state.collective), sides)
            graph.add_edges_from((rank, other) for other in others if isinstance(states.get(other), Blocked))
    try:
        ring = [edge[0] for edge in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        return []
    return ["  ring: " + " waits for ".join(f"rank {rank}" for rank in [*ring, ring[0]])]


def _first_of_each_exception(states: Mapping[int, State]) -> list[Raised]:
    first: dict[str, Raised] = {}
    for _, state in sorted(states.items()):
        if isinstance(state, Raised):
            first.setdefault(state.exception, state)
    return list(first.values())


def rank_states(states: Mapping[int, State], sides: Sides) -> tuple[RankState, ...]:
    """Where each rank stands, as data."""
    return tuple(_rank_state(states[rank], sides) for rank in sorted(states))


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
            where = state.where if isinstance(state, Exited) else ""
            return RankState(state.rank, _describe(state, sides), where=where)
