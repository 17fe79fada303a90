"""The order of calls across groups: what must be complete before what is issued, and rings in it. Pure data in and out.

Each rank asks for an order. To wait for a call says that it is complete before whatever the rank issues next; to issue
one without waiting says nothing of what comes after it. A ring of such demands is a hang wherever members are held
until all have come. A device that runs calls one after another as they were issued, as NCCL's kernels on one device may
do, asks for more: that each call is complete before the next one begins, waited for or not.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import networkx as nx

from fsdpcheck.execution.matching import LOCAL, Instance, Sides, call_text, instance
from fsdpcheck.execution.trace import Collective, Times

AS_WAITED_FOR: Final = (
    "unsafe: calls on several groups come in different orders; a backend that waits for all members hangs"
)
IN_ORDER: Final = (
    "unsafe: calls on several groups are issued in different orders; "
    "devices that run one call after another, as NCCL's may, hang"
)


class Demand(NamedTuple):
    """``rank`` has ``first`` complete before ``then`` is issued, or run."""

    rank: int
    first: Collective
    then: Collective


class _Point(NamedTuple):
    """A place in the program of a rank: after it has waited for the ``number``-th time."""

    rank: int
    number: int


def ring(traces: Mapping[int, Sequence[Collective]], times: Mapping[int, Times] | None = None) -> tuple[Demand, ...]:
    """Demands of ranks that wait for one another, one after the other and the last for the first; () when none do.

    ``times``: of ranks of which it is known when they waited. Otherwise a call is taken to be waited for at once, or if
    it is asynchronous never.
    """
    graph = nx.DiGraph()
    for rank, trace in traces.items():
        known = (times or {}).get(rank)
        _add(graph, rank, _blocking(trace) if known is None else _timed(trace, known))
    return _shortest(graph, traces)


def ring_in_order_of_issue(traces: Mapping[int, Sequence[Collective]]) -> tuple[Demand, ...]:
    """The same of devices that run each call to its end before the next one; () too when every such device goes on.

    Messages are left out: a batch of them runs as one call, and which are a batch is not known.
    """
    left = _left_standing({rank: [call for call in trace if call.tag is None] for rank, trace in traces.items()})
    graph = nx.DiGraph()
    for rank, trace in left.items():
        _add(graph, rank, ((call, waits) for call in trace for waits in (False, True)))
    return _shortest(graph, left)


def _blocking(trace: Sequence[Collective]) -> Iterator[tuple[Collective, bool]]:
    """(call, whether the rank waits for it now or issues it now), in the rank's order."""
    for call in trace:
        yield call, False
        if not call.asynchronous:
            yield call, True


def _timed(trace: Sequence[Collective], times: Times) -> Iterator[tuple[Collective, bool]]:
    moments = [(moment, place) for place, of_call in enumerate(times) for moment in of_call[:2]]
    seen: set[int] = set()
    for _, place in sorted(moments):
        yield trace[place], place in seen
        seen.add(place)


def _add(graph: Any, rank: int, events: Iterator[tuple[Collective, bool]]) -> None:
    """Arrows of one rank: from a call that is waited for to the point after it, from a point to what is issued then."""
    point = _Point(rank, 0)
    for call, waits in events:
        if call.op in LOCAL:
            continue
        if waits:
            after = _Point(rank, point.number + 1)
            graph.add_edges_from([(instance(call), after), *([(point, after)] if point.number else ())])
            point = after
        elif point.number:
            graph.add_edge(point, instance(call))


def _shortest(graph: Any, traces: Mapping[int, Sequence[Collective]]) -> tuple[Demand, ...]:
    """The shortest ring through the earliest call that is in any."""
    tied = {node: part for part in nx.strongly_connected_components(graph) if len(part) > 1 for node in part}
    start = next((node for node in graph if node in tied and isinstance(node, Instance)), None)
    if start is None:
        return ()
    inside = graph.subgraph(tied[start])
    ways = (nx.shortest_path(inside, after, start) for after in inside.successors(start))
    return tuple(_demands([start, *min(ways, key=len)], traces))


def _demands(way: Sequence[Instance | _Point], traces: Mapping[int, Sequence[Collective]]) -> Iterator[Demand]:
    calls = [node for node in way if isinstance(node, Instance)]
    points = [after for before, after in itertools.pairwise(way) if isinstance(before, Instance)]
    for first, then, point in zip(calls, calls[1:], points, strict=False):
        assert isinstance(point, _Point)
        own = {instance(call): call for call in traces[point.rank]}
        yield Demand(point.rank, own[first], own[then])


def _left_standing(traces: Mapping[int, Sequence[Collective]]) -> dict[int, list[Collective]]:
    """What is not run when each rank runs one call after another: no graph is made of a long run in which all is."""
    ahead = {rank: [call for call in reversed(trace) if call.op not in LOCAL] for rank, trace in traces.items()}
    there: dict[Instance, list[int]] = defaultdict(list)
    free = [rank for rank in ahead if ahead[rank]]
    while free:
        rank = free.pop()
        key = instance(ahead[rank][-1])
        there[key].append(rank)
        if len(there[key]) == len(key.members):
            for member in there.pop(key):
                ahead[member].pop()
                free += [member] if ahead[member] else []
    return {rank: calls[::-1] for rank, calls in ahead.items()}


def text(head: str, demands: Sequence[Demand], sides: Sides) -> str:
    """A ring in words: each rank's two calls, with their lines."""
    lines = (
        f"  rank {rank}: {_placed(first, sides)} comes before {_placed(then, sides)}" for rank, first, then in demands
    )
    return "\n".join([head, *lines])


def _placed(call: Collective, sides: Sides) -> str:
    return f"{call_text(call, sides)}{f' at {call.where}' if call.where else ''}"
