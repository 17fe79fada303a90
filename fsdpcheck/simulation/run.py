"""The state of one simulated run, and how its stand-still becomes a report."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from fsdpcheck.case import Averaging
from fsdpcheck.execution import Failure, RankState, SchedulePolicy, deadlock
from fsdpcheck.execution.matching import ranks_text
from fsdpcheck.execution.outcomes import adapter_failure
from fsdpcheck.execution.recording import RecordingGroup
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation import single_rank
from fsdpcheck.simulation.children import Children
from fsdpcheck.simulation.decisions import Decisions, Option
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.exchange import Instance, OpenCall
from fsdpcheck.simulation.files import Files
from fsdpcheck.simulation.globals import RankGlobals, Swap
from fsdpcheck.simulation.group_creation import GroupsMade
from fsdpcheck.simulation.identity import Names
from fsdpcheck.simulation.messages import Messages
from fsdpcheck.simulation.scheduler import CHOICES, Baton, place
from fsdpcheck.simulation.stragglers import Stragglers
from fsdpcheck.simulation.streams import ON_HOST, OnHost
from fsdpcheck.simulation.watch import Watch
from fsdpcheck.simulation.work import MetWork

_ANALYSED_WHOLE = 10_000
"""Calls of a run up to which a stand-still is explained with every rank's number of calls."""


@dataclass(frozen=True)
class World:
    """What ranks are run as.

    ``schedule``: the order in which they get to run. ``averaging``: how a reduction divides (semantics.py).
    ``apart``: global state that each rank has for itself, besides the usual. ``foreign_code`` names whatever code may
    have told DTensor of rules of its own; "" for none. ``joined``: ranks begin with a default process group.
    ``per_node``: ranks of one node, as their environment says; 0 for all. ``watched``: a rank that touches a buffer
    of a call under way fails the run where it does so, and so does an asynchronous call that is never waited for.
    ``alone_of``: the one rank that runs is the first of so many, and the others do what it does (single_rank.py); 0
    where all run.
    ``around``: what is open on each thread that is a rank. ``memory``: makes that of a rank's GPU, of ranks that are
    watched; see Memory. ``streams``: of ranks on a real GPU.
    """

    size: int
    schedule: SchedulePolicy = "forward"
    averaging: Averaging = "divide"
    apart: tuple[Swap, ...] = ()
    foreign_code: str = ""
    joined: bool = True
    per_node: int = 0
    watched: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    memory: Callable[[int, Callable[[Failure], object]], Memory] | None = None
    alone_of: int = 0
    streams: OnHost = ON_HOST

    @property
    def told(self) -> int:
        """How many ranks there are, as ranks are told."""
        return self.alone_of or self.size


class SimulatedRun:
    """The state of one run, shared by its ranks; only the rank that holds the baton touches it.

    After it, ``failure`` is None or the one that the run ended in, ``traces`` has every rank's calls, and ``voids`` why
    this one schedule is no proof for all.
    """

    def __init__(
        self, world: World, looked: Callable[[int], None] | None = None, decisions: Decisions | None = None
    ) -> None:
        """``looked`` is called with each rank that leaves, in its turn. ``decisions``: where order matters; None for
        whoever comes first."""
        self.world, world_size, self.decisions = world, world.size, decisions
        self.heard = decisions or (Decisions() if world.watched else None)
        """What ranks have told each other, of a program that is watched or decided."""
        self.averaging, self.streams = world.averaging, world.streams
        self.globals = RankGlobals(world_size, world.apart, world.per_node, world.told)
        choose = CHOICES[world.schedule]

        def look_and_leave(rank: int) -> None:
            assert looked is not None
            looked(rank)
            self.globals.leave(rank)

        leaving = self.globals.leave if looked is None else look_and_leave
        self.baton = Baton(world_size, choose, leaving, self.globals.enter, self._stuck)
        self.blocked_in: dict[int, Collective] = {}
        self.waits: list[MetWork] = []
        """Of the calls in which ranks are blocked."""
        self.instances: dict[tuple[object, ...], Instance] = {}
        self.messages = Messages()
        self.files = Files(self)
        self.traces: dict[int, list[Collective]] = {rank: [] for rank in range(world_size)}
        self.times: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
        self.clock: Iterator[int] = itertools.count()
        """Counts issues and waits of all ranks; see trace.Times."""
        self.voids: set[str] = set()
        self.stragglers = Stragglers(self.baton, self.voids)
        self.open_calls: dict[int, list[OpenCall]] = {rank: [] for rank in range(world_size)}
        """Calls issued and not yet waited for, by rank."""
        self.alone_of = world.alone_of
        self.payloads: list[int] = []
        """Of a rank alone: how many bytes each of its calls is about."""
        watched = range(world_size) if world.watched else ()
        self.names = {rank: Names() for rank in watched}
        refuse = {rank: partial(self._refused_access, rank) for rank in watched}
        self.memories = {} if world.memory is None else {rank: world.memory(rank, refuse[rank]) for rank in watched}
        looked_at = () if self.alone_of else watched
        self.watches = {rank: Watch(rank, refuse[rank], self.memories.get(rank)) for rank in looked_at}
        self.groups: dict[tuple[object, ...], RecordingGroup] = {}
        """By rank, name and members: whose calls were numbered last."""
        self.groups_made, self.children = GroupsMade(), Children()
        self.daemons: dict[str, set[int]] = {}
        """Daemons that ranks had not stopped when they ended, in words, and by which."""
        self.executors: dict[str, set[int]] = {}
        """Executors that ranks had not shut down when they ended, in words, and by which."""
        self.like_nccl: set[str] = set()
        """Names of the groups for which the program asked for NCCL."""
        self.like_gloo: set[str] = set()
        """Those for which it asked for gloo alone."""
        self.works: list[MetWork] = []
        """Works that no rank holds any more; see there."""
        self.ended: dict[int, deadlock.State] = {}
        self.left: dict[int, int] = {}
        """The exit codes of ranks that have called os._exit or os.abort; below zero, the signal that ended one."""
        self._held_up: Failure | None = None
        """The first time that no rank could move but for a backend that buffers."""
        self.adapter_error: Failure | None = None
        self.failure: Failure | None = None

    def fail(self, failure: Failure) -> None:
        """Record the run's one failure (the first wins) and unwind all ranks."""
        if self.failure is None:
            self.failure = failure
        self.baton.abort()

    def _refused_access(self, rank: int, failure: Failure) -> None:
        self.fail(failure)
        self.baton.block(rank)

    def refused(self, rank: int, error: BaseException) -> None:
        """Fail the run for what a thread that the rank started must not do; nobody need read what a thread raises."""
        failure = adapter_failure(rank, error)
        if failure is not None:
            self.fail(failure)

    def end_rank(self, rank: int, state: deadlock.State) -> None:
        """Note how a rank has ended; one that has left has left, whatever it did afterwards."""
        self.ended[rank] = self._gone(rank) if rank in self.left else state

    def _gone(self, rank: int) -> deadlock.State:
        """How it has left: by an exit code, or by a signal, which stands below zero."""
        code = self.left[rank]
        return deadlock.Exited(rank, code) if code >= 0 else deadlock.Lost(rank, signal.Signals(-code).name)

    @property
    def lasting(self) -> dict[str, frozenset[int]]:
        """Threads and tasks that were left running, in words, and by which ranks."""
        return {f"{what} running": frozenset(ranks) for what, ranks in self.stragglers.left.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What no run fails for and a reader should look at, a sentence each. What a failed run leaves is no leak."""
        if self.failure is not None:
            return tuple(self.files.notes.values())
        threads = [
            f"leak: {ranks_text(ranks)} came to their end with {what} running" for what, ranks in self.daemons.items()
        ]
        executors = [
            f"leak: {ranks_text(ranks)} never shut down {what}, which they had given tasks"
            for what, ranks in self.executors.items()
        ]
        return (*threads, *executors, *self.groups_made.notes(), *self.files.notes.values())

    def finish(self) -> None:
        """After all ranks have ended: what their calls and ends say of the run."""
        self.baton.release()
        self.works.clear()
        if self._held_up is not None:
            hangs = self.failure is not None and self.failure.kind == "deadlock"
            self.failure = _hopeless(self._held_up, self.world.size) if hangs else self._held_up
        if any(self.open_calls.values()):
            self.voids.add("a call was never waited for")
        if self.failure is None and not all(isinstance(s, deadlock.Finished) for s in self.ended.values()):
            self.failure = self.adapter_error or deadlock.explain(self.ended)
        elif self.failure is None and (self.instances or any(self.messages.pending())):
            self.failure = deadlock.analyse(self.traces)  # what all came to has been in order: ranks waited for it
        if self.failure is None or self.failure.kind == "deadlock":
            self.failure = self.groups_made.ring(self.world.size) or self.failure
        self.failure = (
            self.children.failure
            or self.failure
            or _never_waited_for(self.open_calls)
            or self.groups_made.unfinished(self.world.size)
        )

    def _stuck(self, since: float) -> bool:
        """No rank can move: that is the failure, unless a backend that buffers gets on; whether it does is tried."""
        if self.decisions is not None and (options := self._options(self.decisions)):
            self.decisions.decide(options)
            return True
        if self.alone_of and self.adapter_error is None:
            self.fail(single_rank.waits_for_another(self.alone_of, self.states()))
            return False
        states = self.states()
        failure = self.adapter_error or deadlock.explain(states, self._issued(), time.perf_counter() - since)
        if failure.kind == "unsafe" and self._buffer():
            self._held_up = self._held_up or failure
            return True
        self.fail(failure)
        return False

    def _options(self, decisions: Decisions) -> list[Option]:
        """What could happen next, now that no rank can go on by itself."""
        waiting = [option for options in list(decisions.waiting.values()) for option in options()]
        options = [*waiting, *self.messages.options(self)]
        return options or [option for idle in list(decisions.idle.values()) for option in idle]

    def _buffer(self) -> bool:
        """Let each rank go on that waits for others only to take what it has sent; whether there was one."""
        return bool([work for work in list(self.waits) if work.leave_early()])

    def states(self) -> dict[int, deadlock.State]:
        """How each rank has ended, or where it stands."""
        states: dict[int, deadlock.State] = dict(self.ended)
        for rank in sorted(set(range(self.world.size)) - set(states)):
            if rank in self.left:
                states[rank] = self._gone(rank)
                continue
            where, stack = place(self.baton.frame(rank))
            if (collective := self.blocked_in.get(rank)) is not None:
                states[rank] = deadlock.Blocked(rank, collective, where, stack)
            else:
                states[rank] = deadlock.Running(rank, where, stack)
        return states

    def _issued(self) -> dict[int, list[Collective]]:
        """The calls that the analysis of a stand-still needs: all, or in a very long run only the unmatched ones."""
        if sum(map(len, self.traces.values())) <= _ANALYSED_WHOLE:
            return self.traces
        calls: dict[int, list[Collective]] = {rank: [] for rank in self.traces}
        unmatched = [
            *self.messages.pending(),
            *(call for there in self.instances.values() for call in there.calls.items()),
        ]
        for rank, call in unmatched:
            calls[rank].append(call.collective)
        return calls


def _never_waited_for(calls: Mapping[int, Sequence[OpenCall]]) -> Failure | None:
    """Calls of the program's own that nobody has waited for, if there are any."""
    left = [(rank, call) for rank in sorted(calls) for call in calls[rank] if call.issued_at]
    if not left:
        return None
    head = "never waited for: ranks came to their end with calls under way"
    lines = [f"  rank {rank}: {call.collective}, issued at {call.issued_at}" for rank, call in left]
    states = tuple(RankState(rank, "finished", str(call.collective), call.issued_at) for rank, call in left)
    return Failure(
        "never waited for", "\n".join([head, *lines, "  next    keep what the call returns, and wait"]), states
    )


def _hopeless(held_up: Failure, world_size: int) -> Failure:
    """The first stand-still of a run that no buffering could help."""
    _, _, states = held_up.text.partition("\n")
    head = f"deadlock: no rank can move, whether or not the backend buffers (W = {world_size})"
    return replace(held_up, kind="deadlock", text=f"{head}\n{states}")


def no_progress(run: SimulatedRun, why: str) -> Failure:
    """The failure of a run that nobody waits for any more, with the stack of every rank that had not ended.

    Where a rank has raised or left already, that is what went wrong first.
    """
    states = run.states()
    if run.adapter_error is not None:
        return run.adapter_error
    if any(isinstance(state, deadlock.Raised | deadlock.Exited | deadlock.Lost) for state in states.values()):
        return deadlock.explain(states, run.traces)
    text = [f"no progress: {why}"]
    ranks: list[RankState] = []
    for state in states.values():
        if isinstance(state, deadlock.Blocked | deadlock.Running):
            name, call = type(state).__name__.lower(), str(run.blocked_in.get(state.rank, ""))
            ranks.append(RankState(state.rank, name, call, state.where, state.stack))
            told = run.stragglers.told(state.rank) or f"{name} at {state.where or 'its start'}"
            told += inside(state) if isinstance(state, deadlock.Running) else ""
            text.append(f"  rank {state.rank}: {told}")
    return Failure("no progress", "\n".join(text), tuple(ranks))


def inside(state: deadlock.Running) -> str:
    """What of a library a rank that runs is in, innermost: a loop without end is seldom where the program calls it."""
    told = re.match(r'\s*File "(.+)", line (\d+), in (\S+)', state.stack[-1]) if state.stack else None
    return "" if told is None or f"{told[1]}:{told[2]}" == state.where else f", in {told[3]} at {told[1]}:{told[2]}"
