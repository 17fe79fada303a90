"""Job: the calls of all ranks of one run, as every file of traces is written from it and read as it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdpcheck.execution import Failure
from fsdpcheck.execution.deadlock import Blocked, Finished, State
from fsdpcheck.execution.matching import Instance, absent, instance, match
from fsdpcheck.execution.trace import Times, Trace
from fsdpcheck.simulation.simulate import Simulation


@dataclass(frozen=True)
class Job:
    """What is known of a job's calls.

    ``traces``: of each rank that is known, its calls in the order in which it issued them. ``states``: where each of
    them stood when nothing more was recorded. ``times``: when calls were issued and waited for, of simulated ranks.
    ``failure``: what the run itself ended in, where it said so.
    """

    world_size: int
    traces: Mapping[int, Trace]
    states: Mapping[int, State]
    times: Mapping[int, Times] = field(default_factory=dict)
    failure: Failure | None = None
    assumed: Mapping[int, Trace] = field(default_factory=dict)
    """Calls that a rank may have made for all that is known: others made them, and its own record is not there."""
    in_order: bool = False
    """Whether a device runs the calls of a rank one after another, as they were issued."""
    notes: tuple[str, ...] = ()
    """What is unknown of the job and what was taken for granted, a sentence each."""


def of_simulation(done: Simulation) -> Job:
    """The job that was simulated."""
    return of_ranks(dict(enumerate(done.traces)), dict(enumerate(done.times)), done.failure)


def of_ranks(traces: Mapping[int, Trace], times: Mapping[int, Times], failure: Failure | None) -> Job:
    """The job of simulated ranks, all of which are known."""
    where = {state.rank: state.where for state in failure.ranks} if failure is not None else {}
    states: dict[int, State] = {rank: Finished(rank) for rank in traces}
    for rank, moments in times.items():
        for place, of_call in enumerate(moments):
            if len(of_call) == _WAITS:
                states[rank] = Blocked(rank, traces[rank][place], where.get(rank, ""))
    return Job(len(traces), traces, states, times, failure)


_WAITS = 2
"""Moments of a call (trace.Times) that its rank still waits for."""


def completions(job: Job) -> dict[int, list[int | None]]:
    """Of each call of simulated ranks, when all members had issued it, or its rank went on without them; else None."""
    latest: dict[Instance, int] = {}
    for rank, trace in job.traces.items():
        for call, moments in zip(trace, job.times[rank], strict=True):
            latest[instance(call)] = max(moments[0], latest.get(instance(call), -1))
    sides = match(job.traces)
    whole = {key: latest[key] for key in sides if not absent(key, sides)}
    return {
        rank: [
            whole.get(instance(call), _went_on(moments)) for call, moments in zip(trace, job.times[rank], strict=True)
        ]
        for rank, trace in job.traces.items()
    }


def _went_on(moments: Sequence[int]) -> int | None:
    return moments[_WAITS] if len(moments) > _WAITS else None
