"""The state of one simulated run, and how its stand-still becomes a report."""

from __future__ import annotations

import time
from collections.abc import Callable

from fsdpcheck.case import TrainingCase
from fsdpcheck.engines._common.outcomes import adapter_failure
from fsdpcheck.engines._common.recording import RecordingGroup
from fsdpcheck.engines._simulated.globals import RankGlobals
from fsdpcheck.engines._simulated.rendezvous import Instance, MetWork
from fsdpcheck.engines._simulated.scheduler import CHOICES, Baton, place
from fsdpcheck.engines._simulated.stragglers import Stragglers
from fsdpcheck.execution import Execution, Failure, RankResult, RankState, RunRequest, deadlock
from fsdpcheck.execution.trace import Collective

_ANALYSED_WHOLE = 10_000
"""Calls of a run up to which a stand-still is explained with every rank's number of calls."""


class SimulatedRun:
    """The state of one run, shared by its ranks; only the rank that holds the baton touches it."""

    def __init__(
        self, request: RunRequest, rank_local: tuple[str, ...], looked: Callable[[int], None] | None = None
    ) -> None:
        """``looked`` is called with each rank that leaves, in its turn."""
        world_size = request.case.world_size
        self.averaging = request.case.arithmetic.averaging if isinstance(request.case, TrainingCase) else "divide"
        self.globals = RankGlobals(world_size, rank_local)
        choose = CHOICES[request.schedule]

        def look_and_leave(rank: int) -> None:
            assert looked is not None
            looked(rank)
            self.globals.leave(rank)

        leaving = self.globals.leave if looked is None else look_and_leave
        self.baton = Baton(world_size, choose, leaving, self.globals.enter, self._stuck)
        self.blocked_in: dict[int, Collective] = {}
        self.instances: dict[tuple[object, ...], Instance] = {}
        self.traces: dict[int, list[Collective]] = {rank: [] for rank in range(world_size)}
        self.voids: set[str] = set()
        self.stragglers = Stragglers(self.baton, self.voids)
        self.open_calls: dict[int, list[Collective]] = {rank: [] for rank in range(world_size)}
        """Calls issued and not yet waited for, by rank."""
        self.groups: dict[tuple[object, ...], RecordingGroup] = {}
        """By rank, name and members: whose calls were numbered last."""
        self.works: list[MetWork] = []
        """Works that no rank holds any more; see there."""
        self.initialised: set[int] = set()
        """Ranks past group initialisation: from here on the use of the store is the program's own."""
        self.ended: dict[int, deadlock.State] = {}
        self.left: dict[int, int] = {}
        """The exit codes of ranks that have called os._exit or os.abort."""
        self.adapter_error: Failure | None = None
        self.results = [RankResult(rank) for rank in range(world_size)]
        self.execution = Execution("simulated", request, self.results)

    def fail(self, failure: Failure) -> None:
        """Record the run's one failure (the first wins) and unwind all ranks."""
        if self.execution.failure is None:
            self.execution.failure = failure
        self.baton.abort()

    def refused(self, rank: int, error: BaseException) -> None:
        """Fail the run for what a thread that the rank started must not do; nobody need read what a thread raises."""
        failure = adapter_failure(rank, error)
        if failure is not None:
            self.fail(failure)

    def end_rank(self, rank: int, state: deadlock.State) -> None:
        """Note how a rank has ended; one that has left has left, whatever it did afterwards."""
        self.ended[rank] = deadlock.Exited(rank, self.left[rank]) if rank in self.left else state

    @property
    def lasting(self) -> dict[str, frozenset[int]]:
        """Threads and tasks that were left running, in words, and by which ranks."""
        return {f"{what} running": frozenset(ranks) for what, ranks in self.stragglers.left.items()}

    def finish(self) -> None:
        """After all ranks have ended: fill in the execution."""
        self.baton.release()
        self.works.clear()
        self.execution.hand_overs = self.baton.hand_overs
        if any(self.open_calls.values()):
            self.voids.add("a call was never waited for")
        self.execution.voids = tuple(sorted(self.voids))
        for rank, result in enumerate(self.results):
            result.trace = tuple(self.traces[rank])
        if self.execution.failure is None and not all(isinstance(s, deadlock.Finished) for s in self.ended.values()):
            self.execution.failure = self.adapter_error or deadlock.explain(self.ended)
        elif self.execution.failure is None and (self.instances or self._groups_used() > 1):
            self.execution.failure = deadlock.analyse(self.traces)

    def _groups_used(self) -> int:
        """Calls on one group that all met are in order for every legal schedule; several groups need the analysis."""
        return len({call.group_name for trace in self.traces.values() for call in trace})

    def _stuck(self, since: float) -> None:
        states = self.states()
        failure = self.adapter_error or deadlock.explain(states, self._issued(), time.perf_counter() - since)
        self.fail(failure)

    def states(self) -> dict[int, deadlock.State]:
        """How each rank has ended, or where it stands."""
        states: dict[int, deadlock.State] = dict(self.ended)
        for rank in sorted(set(range(len(self.results))) - set(states)):
            if rank in self.left:
                states[rank] = deadlock.Exited(rank, self.left[rank])
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
        for there in self.instances.values():
            for rank, call in there.calls.items():
                calls[rank].append(call.collective)
        return calls


def no_progress(run: SimulatedRun, why: str) -> Failure:
    """The failure of a run that nobody waits for any more, with the stack of every rank that had not ended.

    Where a rank has raised or left already, that is what went wrong first.
    """
    states = run.states()
    if run.adapter_error is not None:
        return run.adapter_error
    if any(isinstance(state, deadlock.Raised | deadlock.Exited) for state in states.values()):
        return deadlock.explain(states, run.traces)
    text = [f"no progress: {why}"]
    ranks: list[RankState] = []
    for state in states.values():
        if isinstance(state, deadlock.Blocked | deadlock.Running):
            name, call = type(state).__name__.lower(), str(run.blocked_in.get(state.rank, ""))
            ranks.append(RankState(state.rank, name, call, state.where, state.stack))
            told = run.stragglers.told(state.rank) or f"{name} at {state.where or 'its start'}"
            text.append(f"  rank {state.rank}: {told}")
    return Failure("no progress", "\n".join(text), tuple(ranks))
