"""What a step costs on more and more ranks: a table for people, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.report.colour import Paint
from fsdpcheck.report.table import aligned
from fsdpcheck.simulation.simulate import Simulation
from fsdpcheck.traces import cost
from fsdpcheck.traces.cost import Link, Machine, Row

SCHEMA: Final = 1
"""Version of the document; it grows with every change that a reader could notice."""
_HEAD: Final = ("ranks", "call", "members", "through", "calls", "moved", "time")
_NUMBERS: Final = (0, 2, 4, 5, 6)
_BYTES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_MADE_UP: Final = 6
"""Most lines that are named of those that asked for a value."""


@dataclass(frozen=True)
class World:
    """One number of ranks, of which the first has run alone."""

    ranks: int
    done: Simulation
    machine: Machine

    @property
    def bounds(self) -> tuple[int, int]:
        """The calls that are counted: of the last step where there are two, else of the whole run."""
        return self.done.steps[-2:] if len(self.done.steps) > 1 else (0, len(self.done.traces[0]))  # type: ignore[return-value]

    @property
    def rows(self) -> list[Row]:
        """Its calls by kind, the dearest first."""
        first, last = self.bounds
        pairs = list(zip(self.done.traces[0], self.done.payloads, strict=True))
        return cost.rows(pairs[first:last], self.machine)


def text(worlds: Sequence[World], paint: Paint) -> str:
    """The table, and under what conditions it holds."""
    lines = [line for world in worlds for line in _rows(world)]
    parts = [paint(_of_what(worlds), "bold"), aligned([_HEAD, *lines], paint, _NUMBERS), _model(worlds[-1].machine)]
    parts.append("  only rank 0 ran, and the others did as it does: what other ranks call beyond that is not in it")
    parts += _made_up(worlds[-1])
    return "\n".join(parts)


def document(worlds: Sequence[World], argv: Sequence[str]) -> dict[str, Any]:
    """The same as JSON data.

    {schema, fsdpcheck, argv, worlds: [{ranks, per_node, rounds, within, between, steps, counted, calls, moved, seconds,
    rows, made_up}]}. ``counted``: "step" or "run". A row is {op, members, spans_nodes, calls, moved, seconds, phases};
    ``moved`` in bytes through the busiest link, ``seconds`` by the model.
    """
    return {
        "schema": SCHEMA,
        "fsdpcheck": __version__,
        "argv": list(argv),
        "worlds": [_world(world) for world in worlds],
    }


def _world(world: World) -> dict[str, Any]:
    rows, machine = world.rows, world.machine
    return {
        "ranks": world.ranks,
        "per_node": machine.per_node,
        "rounds": machine.rounds,
        "within": asdict(machine.within),
        "between": asdict(machine.between),
        "steps": len(world.done.steps),
        "counted": "step" if len(world.done.steps) > 1 else "run",
        "calls": sum(row.calls for row in rows),
        "moved": sum(row.moved for row in rows),
        "seconds": sum(row.seconds for row in rows),
        "rows": [
            {
                "op": row.op, "members": row.members, "spans_nodes": row.spans, "calls": row.calls, "moved": row.moved,
                "seconds": row.seconds, "phases": dict(row.phases),
            }
            for row in rows
        ],
        "made_up": dict(world.done.made_up),
    }  # fmt: skip


def _of_what(worlds: Sequence[World]) -> str:
    steps = {len(world.done.steps) for world in worlds}
    if min(steps) <= 1 < max(steps):
        return "what rank 0 calls in its last step, or in the whole run where no optimizer steps twice"
    if min(steps) > 1:
        return f"what rank 0 calls in one step, the last of {', '.join(map(str, sorted(steps)))}"
    return "what rank 0 calls in the whole run, in which no optimizer steps twice"


def _rows(world: World) -> list[tuple[str, ...]]:
    rows = world.rows
    found = [
        (
            str(world.ranks), row.op, str(row.members), "nodes" if row.spans else "a node", f"{row.calls:,}",
            in_bytes(row.moved), in_seconds(row.seconds),
        )
        for row in rows
    ]  # fmt: skip
    calls, moved = sum(row.calls for row in rows), sum(row.moved for row in rows)
    total = in_seconds(sum(row.seconds for row in rows))
    return [*found, (str(world.ranks), "in all", "", "", f"{calls:,}", in_bytes(moved), total)]


def _model(machine: Machine) -> str:
    def link(one: Link) -> str:
        return f"{in_seconds(one.latency)} and {in_bytes(round(one.bandwidth))}/s"

    return (
        f"  time    a model, no measurement: {link(machine.within)} within a node, {link(machine.between)} between "
        f"nodes (--within, --between),\n          latencies of a {machine.rounds} (--rounds); nothing overlaps"
    )


def _made_up(world: World) -> list[str]:
    asked = sorted(world.done.made_up, key=lambda pair: -pair[1])
    lines = [f"  values  {place} asked {times} times for a value, which was made up" for place, times in asked]
    more = len(lines) - _MADE_UP
    return [*lines[:_MADE_UP], *([f"          and {more} more lines"] if more > 0 else [])]


def in_bytes(number: float) -> str:
    """ "1.3 GB": powers of 1,000."""
    size = 0
    while round(number, 1) >= 999.5 and size < len(_BYTES) - 1:
        number, size = number / 1000, size + 1
    return f"{number:.3g} {_BYTES[size]}"


def in_seconds(seconds: float) -> str:
    """ "12 us"."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for times, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * times < 999.5:
            return f"{seconds * times:.3g} {unit}"
    return f"{seconds:.3g} s"
