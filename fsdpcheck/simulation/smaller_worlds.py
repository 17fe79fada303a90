"""A failure in a smaller world: the same program on fewer ranks that fails in the same way, at the same lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Failure

if TYPE_CHECKING:
    from fsdpcheck.simulation.search import Search

Tried = Callable[[int, int], "Search"]
"""What comes of a program on so many ranks, under so many orders at most."""

_NOT_OF_RANKS: Final = ("adapter", "no progress")
"""Kinds of failure that a smaller world says nothing of: what is not offered, and a budget that ran out."""
_PLACE: Final = re.compile(r"\b(?:at|from) (\S+:\d+)\b")


def shrunk(found: Search, tried: Tried, per_node: int = 0) -> Search:
    """``found``, with the smallest world that fails alike, if one of those does that are smaller.

    Alike: the same kind of failure, of an exception of the same class, at the same lines of the program. A program
    that does not fit a world fails otherwise there. Worlds are tried from one rank upwards, in whole nodes, each under
    as many orders as ``found`` took, so a smaller one whose failure takes more is passed over.
    """
    failure = found.simulation.failure
    if failure is None or failure.kind in _NOT_OF_RANKS:
        return found
    sizes = range(per_node or 1, found.simulation.world_size, per_node or 1)
    asked: list[int] = []
    for size in sizes:
        asked.append(size)
        try:
            small = tried(size, found.schedules)
        except UsageError:  # it cannot be run on so few
            continue
        if small.simulation.failure is not None and alike(failure, small.simulation.failure):
            return replace(found, smaller=small, worlds_tried=tuple(asked))
    return replace(found, worlds_tried=tuple(asked))


def alike(one: Failure, other: Failure) -> bool:
    """Whether two failures, of worlds of any size, are the same one."""
    return (one.kind, one.exception, _lines(one)) == (other.kind, other.exception, _lines(other))


def _lines(failure: Failure) -> frozenset[str]:
    """The lines of the program that a failure names."""
    of_ranks = {state.where for state in failure.ranks if state.where}
    return frozenset({*of_ranks, *_PLACE.findall(failure.text)})
