"""Which units a step may hold gathered, and how often it gathers them, by each layer's forward and backward.

See probes.gathered.

The bound is the schedule's: the unit at work, and the next one at work in the same direction, which may be gathered
ahead. Without ``reshard_after_forward`` also those whose backward in this pass is still to come, and those that a pass
without any backward, such as an evaluation, has left gathered. The root is always allowed: FSDP2 keeps it gathered
between forward and backward unless it is told otherwise.

A unit that is gathered more often costs time and shows in no result: pytorch#105635, a backward that gathers twice.

Source: ``reshard_after_forward`` of ``fully_shard``,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; prefetching: PyTorch FSDP, arXiv:2304.11277,
section 3.3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import NotApplicable, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program import probes
from fsdpcheck.workload import batches, models

_ROOT = ""


@dataclass(frozen=True)
class Event:
    """A layer's forward or backward: its unit ("" for the root), and which inner units hold gathered parameters."""

    kind: str
    layer: str
    unit: str
    gathered: frozenset[str]
    calls: int
    """How many collectives its rank had called by then."""


def assert_scheduled(execution: Execution) -> None:
    """At each layer no inner unit is gathered but those that the schedule has gathered then.

    Raises NotApplicable for a case of several shards and inner units in which no unit is ever seen gathered: then
    modules do not show what is, and nothing can be said.
    """
    case, seen = execution.request.training, False
    left: dict[int, set[str]] = {}
    for rank, where, _, events in _passes(execution):
        backward = next((place for place, event in enumerate(events) if event.kind == "backward"), len(events))
        for place, event in enumerate(events):
            seen = seen or bool(event.gathered)
            phase = events[place:backward] if place < backward else events[place:]
            allowed = {event.unit, _next(event.unit, phase)}
            if not case.mesh.reshard_after_forward:
                before = {event.unit for event in events[:place]} | left.get(rank, set())
                allowed |= _kept(events, place) if place >= backward else before
            if extra := event.gathered - allowed:
                raise _held(event, extra, allowed, where, case.mesh.reshard_after_forward)
        left[rank] = {event.unit for event in events} if backward == len(events) else set()
    if not seen and case.mesh.dp_shard > 1 and case.model.unit_count:
        raise NotApplicable("no unit is seen gathered: the model's own modules do not show it")


def _next(unit: str, phase: list[Event]) -> str:
    """The inner unit whose turn is next in this direction; the root's name if there is none."""
    return next((event.unit for event in phase if event.unit not in (unit, _ROOT)), _ROOT)


def _kept(events: list[Event], place: int) -> set[str]:
    """Units kept for a backward that is still to come, or of which no layer has one."""
    done = {event.unit for event in events[:place] if event.kind == "backward"}
    coming = {event.unit for event in events[place:] if event.kind == "backward"}
    return {event.unit for event in events} - (done - coming)


def _held(event: Event, extra: frozenset[str], allowed: set[str], where: str, freed: bool) -> Violation:
    over = "forward" if event.kind == "forward" or freed else "backward"
    return Violation(
        "units stay gathered",
        got=f"{', '.join(sorted(extra))} gathered in the {event.kind} of {event.layer}",
        wanted=f"of inner units at most {', '.join(sorted(allowed - {_ROOT})) or 'none'}: at work, or next",
        where=where,
        cause=f"a unit is not freed when its {over} is over",
    )


def assert_gathered_once(execution: Execution) -> None:
    """In a call of the model and what follows it no inner unit is gathered more often than its schedule has it.

    Once for each time that its layers come up in the forward, and for each in a backward; where units are kept after
    the forward, once and for each backward but the first. A unit is judged whose gathers say that they are its own.
    """
    case = execution.request.training
    for rank, where, start, events in _passes(execution):
        trace = execution.ranks[rank].trace[start : events[-1].calls if events else start]
        for unit in sorted({event.unit for event in events} - {_ROOT}):
            found = Counter(call.inputs for call in trace if call.op.startswith("all_gather") and call.subject == unit)
            times, most = max(found.values(), default=0), _most(case, unit, events)
            if times > most:
                raise Violation(
                    "a unit is gathered more often than its schedule has it",
                    got=f"{unit} gathered {times} times",
                    wanted=f"at most {most}",
                    where=where,
                    cause="a unit is gathered again while it is kept for its backward"
                    if not case.mesh.reshard_after_forward
                    else "a unit is gathered again within one forward or backward",
                )


def _most(case: TrainingCase, unit: str, events: list[Event]) -> int:
    """How often a unit may be gathered. Its frozen parameters may be gathered apart, in as many bytes."""
    forward, backward = (
        _visits(unit, [event for event in events if event.kind == kind]) for kind in ("forward", "backward")
    )
    if not case.mesh.reshard_after_forward:
        forward, backward = 1, max(backward - 1, 0)
    elif any(event.kind == "backward" for event in events):
        backward = max(backward, 1)
    apart = 2 if "frozen" in case.requires() else 1
    return apart * (max(forward, 1) + backward)


def _visits(unit: str, phase: list[Event]) -> int:
    """How often layers of ``unit`` come up behind those of others."""
    return sum(key == unit for key, _ in groupby(event.unit for event in phase))


def _passes(execution: Execution) -> Iterator[tuple[int, str, int, list[Event]]]:
    """(rank, where in words, collectives before it, the events of one call of the model and what follows it).

    Of every step of every rank.
    """
    case = execution.request.training
    units = [name for names in models.unit_names(case) for name in names]
    for rank in completed(execution):
        for step in range(len(rank.steps)):
            noted = [note for _, at, note in probes.gathered.saw(rank) if at == step]
            calls = [place for place, (kind, *_) in enumerate(noted) if kind == "call"]
            if not calls and not any(batches.indices(case, step)[rank.rank]):
                continue  # without samples a rank may leave its model alone
            if not calls:
                raise UsageError("the run noted no calls of the model; next: run it with probes.gathered")
            for number, (first, after) in enumerate(pairwise([*calls, len(noted)])):
                yield (
                    rank.rank,
                    f"call {number} of the model in step {step}, rank {rank.rank}",
                    noted[first][-1],
                    [
                        Event(kind, layer, _unit(layer, units), _units_of(more, units), calls)
                        for kind, layer, more, calls in noted[first + 1 : after]
                    ],
                )


def _units_of(parameters: list[str], units: list[str]) -> frozenset[str]:
    return frozenset(_unit(name, units) for name in parameters) - {_ROOT}


def _unit(name: str, units: list[str]) -> str:
    """The inner unit that a layer or parameter stands in, or the root's name."""
    return next((unit for unit in units if name == unit or name.startswith(f"{unit}.")), _ROOT)
