"""The calls of simulated ranks over their logical time, as lines of text: who came when, and who waited for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from fsdpcheck.errors import UsageError
from fsdpcheck.execution.matching import Instance, instance, match
from fsdpcheck.execution.trace import Collective
from fsdpcheck.traces.job import Job, completions

_ISSUED, _UNDER_WAY, _WAITED, _NEVER = "I", "-", "=", "X"
LEGEND: Final = f"{_ISSUED} issued  {_UNDER_WAY} under way  {_WAITED} waited for  {_NEVER} never complete"
_LABEL: Final = 36
"""Characters of what a call is."""


def drawn(job: Job, width: int) -> Iterator[str]:
    """A line a call and rank, of ``width`` characters of time and what they are about; one event a character or less.

    Raises UsageError for a job without times.
    """
    if len(job.times) != len(job.traces):
        raise UsageError("dumps have no common time; next: show what fsdpcheck simulate --trace wrote")
    moments = [moment for times in job.times.values() for of_call in times for moment in of_call]
    scale = min(1.0, width / (max(moments, default=0) + 2))
    ends = completions(job)
    bars = {
        (rank, instance(call)): _bar(of_call, end, width, scale)
        for rank, trace in job.traces.items()
        for call, of_call, end in zip(trace, job.times[rank], ends[rank], strict=True)
    }
    yield f"{LEGEND}, from left to right in the order of events"
    for key, calls in _by_issue(job).items():
        for place, rank in enumerate(sorted(calls)):
            what = _what(calls[rank]) if place == 0 else ""
            yield f"{what[:_LABEL]:<{_LABEL}} {f'rank {rank}':>8} |{bars[rank, key]}| {calls[rank].where}".rstrip()


def _by_issue(job: Job) -> Mapping[Instance, Mapping[int, Collective]]:
    """The calls by instance, in the order in which the first member of each issued it."""
    first: dict[Instance, int] = {}
    for rank, trace in job.traces.items():
        for call, of_call in zip(trace, job.times[rank], strict=True):
            first[instance(call)] = min(of_call[0], first.get(instance(call), of_call[0]))
    sides = match(job.traces)
    return {key: sides[key] for key in sorted(sides, key=first.__getitem__)}


def _what(call: Collective) -> str:
    whose = call.subject or call.about
    return f"{call.op}{f' of {whose}' if whose else ''} #{call.sequence}, group {call.group_name}"


def _bar(moments: Sequence[int], end: int | None, width: int, scale: float) -> str:
    """One call of one rank: from its issue to its end, or to where the rank went on if that is later."""
    places = [min(int(moment * scale), width - 1) for moment in moments]
    last = width - 1 if end is None else min(int(end * scale), width - 1)
    drawn = [" "] * width
    drawn[places[0] : last + 1] = _UNDER_WAY * (last + 1 - places[0])
    if len(places) > 1:
        until = places[2] if len(places) > 2 else last
        drawn[places[1] : until + 1] = _WAITED * (until + 1 - places[1])
    drawn[places[0]] = _ISSUED
    if end is None:
        drawn[last] = _NEVER
    return "".join(drawn)
