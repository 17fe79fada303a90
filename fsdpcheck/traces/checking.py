"""What is wrong with a job's calls: the analysis of simulated runs, on what is known of any job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from fsdpcheck.execution import Failure, deadlock, orders
from fsdpcheck.execution.deadlock import Blocked
from fsdpcheck.execution.matching import Sides, absent, first_mismatch, instance, match, mismatch_text, ranks_text
from fsdpcheck.execution.trace import Trace
from fsdpcheck.traces.job import Job


def finding(job: Job) -> Failure | None:
    """The one thing that is wrong; None if the calls show nothing.

    Where a run said itself what it ended in, and its calls do not show the same, that is what is wrong.
    """
    found = _found(job)
    if job.failure is not None and (found is None or found.kind != job.failure.kind):
        return job.failure
    return found


def under_way(job: Job) -> Iterator[str]:
    """Calls that did not end though all that are known had come, a sentence each: no order of calls explains them."""
    sides = match(_with_assumed(job))
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, state in sorted(job.states.items()):
        if isinstance(state, Blocked) and not absent(instance(state.collective), sides):
            ranks[f"{state.collective}{f' at {state.where}' if state.where else ''}"].append(rank)
    for call, those in ranks.items():
        yield f"{ranks_text(those)} stood in {call}, to which all members that are known had come"


def undecided(job: Job) -> Iterator[str]:
    """Calls that did not end, and have members of which nothing is known, a sentence each: one may be the cause."""
    ranks: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, state in sorted(job.states.items()):
        if isinstance(state, Blocked):
            unknown = tuple(member for member in state.collective.group if member not in job.traces)
            call = f"{state.collective}{f' at {state.where}' if state.where else ''}"
            if unknown:
                ranks[call, unknown].append(rank)
    for (call, unknown), those in ranks.items():
        unknown_ranks = ranks_text(unknown)
        yield f"{ranks_text(those)} stood in {call}, and there is no dump of {unknown_ranks}, which has part in it"


def _found(job: Job) -> Failure | None:
    sides = match(job.traces)
    if (key := first_mismatch(sides)) is not None:
        return _with_states(job, Failure("mismatch", mismatch_text(key, sides, placed=True)), sides)
    traces = _with_assumed(job)
    if deadlock.nobody_can_move(job.states, traces):
        return deadlock.explain(job.states, traces)
    failure = deadlock.analyse(traces, job.times)
    if failure is None and job.in_order:
        demands = orders.ring_in_order_of_issue(job.traces)
        failure = Failure("unsafe", orders.text(orders.IN_ORDER, demands, sides)) if demands else None
    return None if failure is None else _with_states(job, failure, match(traces))


def _with_assumed(job: Job) -> dict[int, Trace]:
    known = sorted({*job.traces, *job.assumed})
    return {rank: (*job.assumed.get(rank, ()), *job.traces.get(rank, ())) for rank in known}


def _with_states(job: Job, failure: Failure, sides: Sides) -> Failure:
    """The failure with where each rank stood, if one stood in a call."""
    lines = deadlock.rank_lines(job.states, sides)
    stood = any(isinstance(state, Blocked) for state in job.states.values())
    text = "\n".join([failure.text, *(lines if stood else ())])
    return replace(failure, text=text, ranks=deadlock.rank_states(job.states, sides))
