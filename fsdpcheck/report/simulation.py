"""What came of a simulation: for people, with the lines of the program that ranks stood at, and as JSON."""

from __future__ import annotations

import linecache
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.errors import FINDING, HOLDS, NO_PROGRESS, USAGE
from fsdpcheck.execution import Failure, orders
from fsdpcheck.execution.deadlock import AT_ONCE
from fsdpcheck.execution.matching import match
from fsdpcheck.report.colour import Paint
from fsdpcheck.simulation.decisions import encoded
from fsdpcheck.simulation.search import Search
from fsdpcheck.simulation.simulate import Simulation
from fsdpcheck.traces import plain

SCHEMA: Final = 3
"""Version of the document; it grows with every change that a reader could notice."""
_WIDTH: Final = 120
_AROUND: Final = 2
"""Lines that are shown before and after the one that a rank stood at."""


def exit_code(done: Simulation) -> int:
    """0 every rank came to its end; 1 a finding; 2 the program asks for what is not offered, or ends itself with 2
    before ranks meet, as for arguments that it does not know; 4 no progress."""
    if done.failure is None:
        return HOLDS
    if done.failure.text.startswith(AT_ONCE.format(code=USAGE)):
        return USAGE
    return {"adapter": USAGE, "no progress": NO_PROGRESS}.get(done.failure.kind, FINDING)


def ending(found: Search, paint: Paint) -> str:
    """The report: what happened, where in the program, and on what it is conditional."""
    done = found.simulation
    parts = [_completed(done, paint) if done.failure is None else failed(done.failure, paint)]
    if done.failure is None:  # a rank that is unwound leaves much as it is
        parts += [f"  {sentence}; it was put back" for sentence in done.left]
    parts += [f"  {sentence}" for sentence in done.shared]
    parts += [f"  note    {note}" for note in done.notes]
    if done.failure is None and done.out_of_order:
        parts.append(paint(_out_of_order(done), "yellow"))
    parts += _gpus(done)
    parts.append(_conditions(found))
    parts += _smaller(found, paint)
    return "\n".join(part for part in parts if part)


def failed(failure: Failure, paint: Paint) -> str:
    """What went wrong, with the lines of the program that ranks stood at."""
    first, _, rest = failure.text.partition("\n")
    head = paint(first, "red") + (f"\n{rest}" if rest else "")
    return "\n".join([head, *_places(failure, paint)])


def lost(name: str, paint: Paint) -> str:
    """The report of a process that was killed in the middle."""
    return f"{paint(f'lost: the process of the ranks was killed by {name}', 'red')}\n  next    see what it printed last"


def document(found: Search, argv: Sequence[str]) -> dict[str, Any]:
    """The same as JSON data.

    {schema, fsdpcheck, argv, world_size, exit_code, failure, ranks, voids, left, shared, hand_overs, notes,
    schedules, drawn, order, smaller, worlds_tried, substitutions, out_of_order}. ``schedules``: orders of ranks that
    were run; ``drawn``: None, or of those that were drawn {orders, depth, takers, choices, counted, chance},
    see simulation/priorities.py; ``order``: the decisions that the failure needs. ``smaller``: None, or that failure
    in the smallest of the ``worlds_tried`` that has it, {world_size, failure, order}. ``substitutions``: how often what
    of a GPU was played on the CPU, by name. ``failure``: None, or {kind, text, exception, ranks: [{rank, state,
    waiting_for, where, stack}]}. ``ranks``: {rank, printed, calls} of each; a call is {op, group, ranks, number,
    reduce_op, root, inputs, outputs, asynchronous, subject, tag, about, phase, where, times}, for ``times`` see
    execution.trace.Times.
    """
    done = found.simulation
    return {
        "schema": SCHEMA,
        "fsdpcheck": __version__,
        "argv": list(argv),
        "world_size": done.world_size,
        "exit_code": exit_code(done),
        "failure": plain.of_failure(done.failure),
        "ranks": [
            {"rank": rank, "printed": printed, "calls": list(map(plain.of_call, trace, times))}
            for rank, (printed, trace, times) in enumerate(zip(done.printed, done.traces, done.times, strict=True))
        ],
        "voids": list(found.voids or done.voids),
        "left": list(done.left),
        "shared": list(done.shared),
        "hand_overs": done.hand_overs,
        "notes": list(done.notes),
        "schedules": found.schedules,
        "drawn": _drawn(found),
        "order": list(found.order),
        "smaller": _small(found.smaller),
        "worlds_tried": list(found.worlds_tried),
        "substitutions": dict(done.substitutions),
        "out_of_order": _out_of_order(done),
    }


def _drawn(found: Search) -> dict[str, Any] | None:
    if found.drawn is None:
        return None
    return {**asdict(found.drawn), "chance": str(found.drawn.chance)}


def _small(found: Search | None) -> dict[str, Any] | None:
    if found is None:
        return None
    done = found.simulation
    return {"world_size": done.world_size, "failure": plain.of_failure(done.failure), "order": list(found.order)}


def lost_document(name: str) -> dict[str, Any]:
    """The same of a process that was killed in the middle: of its ranks nothing is known."""
    text = f"the process of the ranks was killed by {name}"
    failure = {"kind": "lost", "text": text, "exception": "", "ranks": []}
    return {"schema": SCHEMA, "fsdpcheck": __version__, "exit_code": FINDING, "failure": failure}


def _completed(done: Simulation, paint: Paint) -> str:
    calls = Counter(call.op for trace in done.traces for call in trace)
    said = ", ".join(f"{count} {op}" for op, count in sorted(calls.items()))
    ranks = f"{done.world_size} rank{'s' if done.world_size > 1 else ''}"
    return (
        f"{paint('completed', 'green')}: {ranks}; {f'calls of all ranks: {said}' if said else 'no rank communicated'}"
    )


def _places(failure: Failure, paint: Paint) -> Iterator[str]:
    """The source around each line that a rank stood at, once."""
    ranks: dict[str, list[int]] = {}
    for state in failure.ranks:
        if state.where:
            ranks.setdefault(state.where, []).append(state.rank)
    for where, those in ranks.items():
        file, _, number = where.rpartition(":")
        shown = list(_source(file, int(number), paint)) if number.isdecimal() else []
        if shown:
            yield f"  {'ranks' if len(those) > 1 else 'rank'} {', '.join(map(str, those))} at {where}"
            yield from shown


def _source(file: str, number: int, paint: Paint) -> Iterator[str]:
    lines = linecache.getlines(file)
    for place in range(max(number - _AROUND, 1), min(number + _AROUND, len(lines)) + 1):
        text = f"    {'>' if place == number else ' '} {place:5} {lines[place - 1].rstrip()}"
        yield paint(text, "bold") if place == number else text


def _gpus(done: Simulation) -> Iterator[str]:
    """What was played on the CPU; or that there is no GPU, where that may be why nobody communicated."""
    if done.substitutions:
        told = ", ".join(f"{name} {count}" for name, count in done.substitutions)
        yield textwrap.fill(f"played on the CPU: {told}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
    elif done.asked_for_gpu and not any(done.traces):
        yield f"  it asked for a GPU at {done.asked_for_gpu}, and there is none; to play one, add --cuda-as-cpu"


def _conditions(found: Search) -> str:
    """How many orders were run, and whether another may end otherwise; of a failure, how to have it again."""
    if found.simulation.failure is not None:
        return f"  again   add --order {encoded(found.order)}" if found.order else ""
    voids = found.voids or found.simulation.voids
    otherwise = "; another may end otherwise" if voids or (found.schedules > 1 and not found.complete) else ""
    told = f"  {found.did}{otherwise}{': ' if voids else ''}{'; '.join(voids)}"
    return f"{told}\n  drawn   {found.drawn}" if found.drawn is not None else told


def _smaller(found: Search, paint: Paint) -> Iterator[str]:
    """The same failure in the smallest world that has it, and how to have it again; or that none has."""
    if found.smaller is None:
        if found.worlds_tried:
            first, last = found.worlds_tried[0], found.worlds_tried[-1]
            yield f"  no smaller world fails alike: W = {first}{f' to {last}' if last > first else ''} tried"
        return
    small = found.smaller.simulation
    assert small.failure is not None
    sizes = f"found at W = {found.simulation.world_size}; the smallest world that fails alike: W = {small.world_size}"
    yield paint(sizes, "bold")
    yield failed(small.failure, paint)
    order = f" and --order {encoded(found.smaller.order)}" if found.smaller.order else ""
    yield f"  again   with -n {small.world_size}{order}"


def _out_of_order(done: Simulation) -> str:
    sides = match(dict(enumerate(done.traces)))
    return orders.text(orders.IN_ORDER, done.out_of_order, sides) if done.out_of_order else ""
