"""The caching allocator of one rank's GPU: whose memory is whose, and who may be given what was freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fsdpcheck.execution import Failure
from fsdpcheck.simulation.device import wording
from fsdpcheck.simulation.device.history import Access, History, Line
from fsdpcheck.simulation.device.timelines import Timeline, Timelines

_SMALL: Final = 1 << 20
"""Bytes up to which torch's allocator takes memory from a pool of its own."""


@dataclass(eq=False, slots=True)
class Block:
    """The memory of one storage. ``owner``: the stream on which it was allocated, None where that is not known.

    ``place``: "gpu"; "pinned", of the host, which copies use while the host goes on; "" while nothing is known.
    ``recorded``: streams for which ``record_stream`` was called. ``allocated``: the line.
    """

    place: str
    owner: Timeline | None = None
    allocated: Line = None
    history: History = field(default_factory=History)
    recorded: set[Timeline] = field(default_factory=set)
    bytes: int = 0
    storage: Any = None


@dataclass(frozen=True, slots=True)
class Freed:
    """Memory that its owner can be given again, while ``uses`` on other streams may still be under way.

    ``allocated``, ``line``: where it was, and where it was freed.
    """

    bytes: int
    allocated: Line
    uses: list[Access]
    line: Line


class Allocator:
    """What was freed while other streams may use it. ``refuse`` is given what breaks the order, and does not return."""

    def __init__(self, rank: int, timelines: Timelines, refuse: Callable[[Failure], object]) -> None:
        self._rank, self.timelines, self._refuse = rank, timelines, refuse
        self._free: dict[Timeline, list[Freed]] = {}

    def give_back(self, block: Block, line: Line) -> None:
        if block.place != "gpu" or block.owner is None or not block.bytes:
            return
        uses = block.history.unordered(block.owner, block.recorded)
        if uses:
            self._free.setdefault(block.owner, []).append(Freed(block.bytes, block.allocated, uses, line))

    def reuse(self, block: Block) -> None:
        """The owner allocates: it may be given what it has freed, unless it waits for the uses by then."""
        freed = self._free.get(owner := self.timelines.current)
        if not freed:
            return
        self.timelines.launch(owner)
        left = []
        for gone in freed:
            uses = [use for use in gone.uses if not use.is_before(owner)]
            if uses and block.place == "gpu" and _fits(block.bytes, gone.bytes):
                self._refuse(wording.freed_in_use(self._rank, gone, uses[0], owner, block))
            if uses:
                left.append(replace(gone, uses=uses))
        self._free[owner] = left


def _fits(wanted: int, there: int) -> bool:
    """Whether torch's allocator may take a block of ``there`` bytes for a request of ``wanted``."""
    return 0 < wanted <= there and (wanted <= _SMALL) == (there <= _SMALL)
