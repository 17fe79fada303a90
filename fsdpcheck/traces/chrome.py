"""Chrome's trace events, which Perfetto opens: a process a rank, a track its program, and a track each of its groups.

Time is logical: a microsecond is one event, an issue or a wait, of all ranks, in the order in which they happened. On
the track of its program, a rank issues a call and waits for it. On the track of a group, a call lasts from its issue,
or from the end of the call before it, until the last member has come; arrows lead from the member that came first
through the others to the one that came last. A call that never ended lasts to the end of the trace.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.errors import reading
from fsdpcheck.execution.matching import Instance, instance, match, ranks_text
from fsdpcheck.execution.trace import Collective, Trace
from fsdpcheck.traces import plain
from fsdpcheck.traces.job import Job, completions, of_ranks

SCHEMA: Final = 1
"""Version of what is in the events' ``args`` and in ``otherData``."""

_Event = dict[str, Any]
_PROGRAM: Final = "program"


def document(job: Job) -> dict[str, Any]:
    """The trace of simulated ranks as JSON data."""
    last = max((moment for times in job.times.values() for of_call in times for moment in of_call), default=0)
    end = last + 2  # past the end of a call that was complete at the last moment
    ends = completions(job)
    bars = {rank: _Bars(job, rank, ends[rank], end) for rank in job.traces}
    events = [event for rank in job.traces for event in bars[rank].events()]
    sides = match(job.traces)
    for number, (key, calls) in enumerate(sides.items()):
        events += _arrows(number, key, [bars[rank].of_call[key] for rank in calls])
    said = {"fsdpcheck": __version__, "schema": SCHEMA, "ranks": len(job.traces)}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**said, "failure": plain.of_failure(job.failure)},
    }


class _Bars:
    """The tracks of one rank and the bars on them."""

    def __init__(self, job: Job, rank: int, ends: Sequence[int | None], end: int) -> None:
        self._rank, self._trace, self._times = rank, job.traces[rank], job.times[rank]
        self._ends, self._end = ends, end
        names = dict.fromkeys([_PROGRAM, *map(_track, self._trace)])
        self._places = {name: place for place, name in enumerate(names)}
        self._state = next((state for state in job.failure.ranks if state.rank == rank), None) if job.failure else None
        self.of_call: dict[Instance, _Event] = {}
        """The bar on the track of its group of each call."""

    def events(self) -> Iterator[_Event]:
        yield from self._tracks()
        for place, (call, moments) in enumerate(zip(self._trace, self._times, strict=True)):
            told = {"call": place, "where": call.where}
            yield self._bar(_PROGRAM, call.op, moments[0], moments[0] + 1, told)
            if len(moments) > 1:
                until = moments[2] if len(moments) > 2 else self._end
                yield self._bar(_PROGRAM, f"wait for {call.op}", moments[1], until, told)
        yield from self._under_way()
        if self._state is not None:
            said = f"{self._state.state}{': ' if self._state.waiting_for else ''}{self._state.waiting_for}"
            yield {**self._on(_PROGRAM), "ph": "i", "s": "t", "name": said, "ts": self._end}

    def _under_way(self) -> Iterator[_Event]:
        free: dict[str, int] = defaultdict(int)
        for call, moments, ended in zip(self._trace, self._times, self._ends, strict=True):
            track = _track(call)
            began = max(moments[0], free[track])
            free[track] = max(self._end if ended is None else ended + 1, began + 1)
            whose = call.subject or call.about
            name = f"{call.op} of {whose}" if whose else call.op
            said = {**plain.of_call(call, moments), "state": "complete" if ended is not None else "never complete"}
            bar = self._bar(track, name if ended is not None else f"{name}, never complete", began, free[track], said)
            self.of_call[instance(call)] = bar
            yield bar

    def _tracks(self) -> Iterator[_Event]:
        yield {**self._on(_PROGRAM), "ph": "M", "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        yield {**self._on(_PROGRAM), "ph": "M", "name": "process_sort_index", "args": {"sort_index": self._rank}}
        for name, place in self._places.items():
            yield {**self._on(name), "ph": "M", "name": "thread_name", "args": {"name": name}}
            yield {**self._on(name), "ph": "M", "name": "thread_sort_index", "args": {"sort_index": place}}

    def _bar(self, track: str, name: str, began: int, ended: int, said: Mapping[str, Any]) -> _Event:
        return {**self._on(track), "ph": "X", "name": name, "ts": began, "dur": ended - began, "args": said}

    def _on(self, track: str) -> _Event:
        pid = self._rank + 1  # 0 is nobody's
        category = "program" if track == _PROGRAM else "call"
        return {"pid": pid, "tid": pid << 16 | self._places[track], "cat": category}


def _track(call: Collective) -> str:
    if call.tag is None:
        return f"group {call.group_name}: {ranks_text(call.group)}"
    way = "any source" if len(call.group) != 2 else f"rank {call.group[0]} to rank {call.group[1]}"
    return f"group {call.group_name}: messages, {way}, tag {call.tag}"


def _arrows(number: int, key: Instance, bars: Iterable[_Event]) -> Iterator[_Event]:
    """From the member that came first to the one that came last; a member alone has none."""
    ordered = sorted(bars, key=lambda bar: (bar["ts"], bar["args"]["times"]))
    for place, bar in enumerate(ordered if len(ordered) > 1 else ()):
        phase = "s" if place == 0 else "f" if place == len(ordered) - 1 else "t"
        on = {name: bar[name] for name in ("pid", "tid", "ts")}
        yield {**on, "ph": phase, "bp": "e", "id": number, "cat": "members", "name": f"call #{key.sequence}"}


def read(data: Mapping[str, Any]) -> Job:
    """The job of a document of ``document``. Raises reading.Unreadable for a trace of somebody else."""
    said = data.get("otherData")
    if not isinstance(said, dict) or "fsdpcheck" not in said:
        raise reading.Unreadable("it holds trace events, but none that fsdpcheck wrote")
    if said.get("schema") != SCHEMA:
        raise reading.Unreadable(f"its schema is {said.get('schema')!r}, wanted {SCHEMA}")
    calls: dict[int, list[tuple[Collective, tuple[int, ...]]]] = {
        rank: [] for rank in range(reading.typed(int, said.get("ranks"), "otherData.ranks"))
    }
    for place, event in enumerate(reading.typed(tuple[Any, ...], data["traceEvents"], "traceEvents")):
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") == "call":
            told = {name: value for name, value in dict(event.get("args") or {}).items() if name != "state"}
            rank = reading.typed(int, event.get("pid"), f"traceEvents[{place}].pid") - 1
            if rank not in calls:
                raise reading.Unreadable(f"traceEvents[{place}] is of rank {rank} of {len(calls)}")
            calls[rank].append(plain.call(told, f"traceEvents[{place}].args"))
    failure = plain.failure(said.get("failure"), "otherData.failure")
    traces: dict[int, Trace] = {rank: tuple(call for call, _ in known) for rank, known in calls.items()}
    return of_ranks(traces, {rank: [times for _, times in known] for rank, known in calls.items()}, failure)
