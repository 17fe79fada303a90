"""Accesses to one piece of memory, and which of them meet without an order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Final

from fsdpcheck.simulation.device.timelines import Timeline

_MOST: Final = 64
"""Accesses that are remembered of one piece of memory; of more, the oldest reads are forgotten, then the oldest."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a storage from ``first`` to before ``last``; ``layout``: None where all of them belong to the tensor,
    else its sizes and strides."""

    first: int
    last: int
    layout: tuple[object, ...] | None = None

    def meets(self, other: Span) -> bool:
        """Whether both surely have a byte in common. Two with gaps: only equal ones, since others may interleave."""
        if self.first >= other.last or other.first >= self.last:
            return False
        if self.layout is None and other.layout is None:
            return True
        if self.layout is not None and other.layout is not None:
            return self == other
        whole, gappy = (self, other) if self.layout is None else (other, self)
        return whole.first <= gappy.first < whole.last or whole.first < gappy.last <= whole.last

    def covers(self, other: Span) -> bool:
        """Whether all bytes of the other are among its."""
        return self == other or (self.layout is None and self.first <= other.first and other.last <= self.last)


Line = tuple[CodeType, int] | None
"""A line of the program, not made text of yet."""


@dataclass(frozen=True, slots=True)
class Access:
    """An operation that read or wrote bytes: on which timeline, when, which one, at which line."""

    timeline: Timeline
    time: int
    span: Span
    writes: bool
    operation: str
    line: Line

    def is_before(self, timeline: Timeline) -> bool:
        """Whether what is issued there now comes after it."""
        return timeline.is_after(self.timeline, self.time)


class History:
    """The accesses to one piece of memory that later ones have to come after."""

    __slots__ = ("accesses",)

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def add(self, new: Access) -> Access | None:
        """Remember an access; gives an earlier one that it meets without an order, if there is one."""
        kept, broken = [], None
        for old in self.accesses:
            if not new.span.meets(old.span):
                kept.append(old)
            elif (new.writes or old.writes) and not old.is_before(new.timeline):
                broken = broken or old
                kept.append(old)
            elif not _replaces(new, old):
                kept.append(old)
        kept.append(new)
        if len(kept) > _MOST:
            del kept[next((place for place, old in enumerate(kept) if not old.writes), 0)]
        self.accesses = kept
        return broken

    def unordered(self, timeline: Timeline, but: Iterable[Timeline]) -> list[Access]:
        """Accesses that what is issued on the timeline now does not come after, those on ``but`` left out."""
        left_out = set(but)
        return [old for old in self.accesses if old.timeline not in left_out and not old.is_before(timeline)]


def _replaces(new: Access, old: Access) -> bool:
    """Whether whoever comes after the new access has no need to look at the old one, which came before it."""
    if not new.span.covers(old.span):
        return False
    return new.writes or (not old.writes and old.timeline is new.timeline)
