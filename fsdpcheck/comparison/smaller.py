"""The same difference with smaller numbers: those that the user has marked in the command line, ``{layers:4}``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fsdpcheck.comparison.results import Comparison, World


@dataclass(frozen=True)
class Smaller:
    """``marked``: the smallest numbers found at which ``world`` still differs alike. ``tried``: comparisons made."""

    marked: Mapping[str, int]
    world: World
    tried: int


def smaller(found: Comparison, again: Callable[[int, Mapping[str, int]], Comparison]) -> Smaller | None:
    """The smallest world that differs, with each marked number as small as it goes; None where nothing differs.

    ``again(ranks, marked)`` compares that number of ranks with the base. Each number is lowered in turn, to 1, 2,
    4, ... until the world differs alike: in the same fact, or in the same kind of observable.
    """
    wrong = [world for world in found.worlds if world.says in ("differs", "fails")]
    if not wrong or not found.line.marked:
        return None
    world, marked, tried = min(wrong, key=lambda each: each.size), dict(found.line.marked), 0
    kind = what_differs(world)
    for name in found.line.marked:
        for value in _lower(marked[name]):
            tried += 1
            (there,) = again(world.size, {**marked, name: value}).worlds or (None,)
            if there is not None and what_differs(there) == kind:
                marked[name], world = value, there
                break
    return Smaller(marked, world, tried)


def _lower(value: int) -> Iterator[int]:
    """1, 2, 4, ... below ``value``."""
    lower = 1
    while lower < value:
        yield lower
        lower *= 2


def what_differs(world: World) -> tuple[str, ...]:
    """In what a world differs from the base, without step and numbers."""
    if world.failure is not None:
        return ("failure", world.failure.kind)
    if world.fact is not None:
        return ("fact", world.fact.kind)
    return () if world.first is None else ("observable", world.first.key.kind)
