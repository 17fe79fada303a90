"""Ranks that look into stores again and again: a look that would find what the last one found is put off.

It waits until something has changed in a store, or no other rank can go on, so that a rank that spins on a key spins
once for each change. A program that counts how often it looked could tell: that is a void.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from fsdpcheck.simulation.decisions import Access, Option

if TYPE_CHECKING:
    from fsdpcheck.simulation.run import SimulatedRun

VOID: Final = "a rank looked into a store again, and nothing had changed: that answer was tried once"


@dataclass(slots=True)
class Looks:
    """What ranks have looked at since anything changed: in a store, or by a call of the rank."""

    changes: int = 0
    """Of all stores."""
    _since: dict[int, tuple[int, int]] = field(default_factory=dict)
    _seen: dict[int, set[Hashable]] = field(default_factory=dict)

    def look(self, run: SimulatedRun, name: str, access: Access) -> None:
        """Before a rank uses a key: put it off if it has done so since the last change. May raise Aborted."""
        rank, look = access.rank, (name, access.shared, access.where)
        since = self.changes, len(run.traces[rank])
        if self._since.get(rank) != since:
            self._since[rank], self._seen[rank] = since, set()
        if look in self._seen[rank]:
            run.voids.add(VOID)
            self._put_off(run, name, access)
        self._seen[rank].add(look)

    def _put_off(self, run: SimulatedRun, name: str, access: Access) -> None:
        rank, before, decisions = access.rank, self.changes, run.decisions
        if decisions is None:
            run.baton.pause(rank)
            return

        def act() -> None:
            del decisions.waiting[rank], decisions.idle[rank]
            run.baton.wake(rank)

        option = Option(key := decisions.name(rank, f"{name} again"), key, Access(rank, ("look", rank), False), act)
        decisions.idle[rank] = [option]
        decisions.waiting[rank] = lambda: [option] if self.changes != before else []
        run.baton.block(rank)
