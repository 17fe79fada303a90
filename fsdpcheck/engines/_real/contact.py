"""Whether torchrun's processes are there: this node's as the system tells, those of others as long as they are heard.

A process that ends closes its lifeline. A node that is cut off says nothing more, not even that it ends. So the keepers
of other nodes give a sign all the time, and who is silent for long has been lost. Either ends the session; it is no
verdict on what is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

from fsdpcheck.engines._real import launch
from fsdpcheck.engines._real.lifeline import Lifeline, Lifelines
from fsdpcheck.engines._real.post import DriversStore
from fsdpcheck.processes import leftovers

SIGN_SECONDS: Final = 0.5
"""From one sign of a keeper to its next, and from one look of the driver for signs to the next."""
SILENCE_SECONDS: Final = 60.0
"""How long nothing has to be heard of a process before it has been lost.

A keeper gives its signs from a thread that does little else, so what it computes or imports makes no silence. A network
that fails for a while does: TCP sends again at doubled distances, so that what was lost for t seconds may come after
2 t. A minute lets a failure of half of one pass, and is a tenth of what torchrun waits for a node in its rendezvous.
"""


class Silence:
    """How long somebody has said nothing new, as far as it was listened to.

    From one look to the next at most two of SIGN_SECONDS are charged: while this process was stopped, or did something
    else, nobody was silent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked = clock, clock()
        self._heard: Hashable = None
        self.seconds = 0.0

    def look(self, heard: Hashable) -> float:
        """``heard``: what differs from what was heard last if there is anything new. Returns the seconds of silence."""
        now = self._clock()
        self.seconds = 0.0 if heard != self._heard else self.seconds + min(now - self._looked, 2 * SIGN_SECONDS)
        self._looked, self._heard = now, heard
        return self.seconds


class Signs:
    """The keeper's side: that it is there, and that it has been told to end. ``lifeline``: to hold, of another node."""

    def __init__(
        self,
        store: Any,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        lifeline: Lifeline | None = None,
    ) -> None:
        self._store, self._rank, self._clock, self._given = store, rank, clock, -SIGN_SECONDS
        self._lifeline = lifeline

    def give(self) -> None:
        """Give a sign if it is time for one."""
        if self._clock() - self._given >= SIGN_SECONDS:
            self._given = self._clock()
            self._store.add(f"signs of {self._rank}", 1)
            if self._lifeline is not None:
                self._lifeline.hold()

    def leave(self) -> None:
        """Say that torchrun has told this process to end."""
        self._store.set(f"rank {self._rank} leaves", "")
        self._store.add("leaving", 1)


class Contact:
    """The driver's side. Whoever is gone or lost once stays so: torchrun's job cannot go on without it."""

    def __init__(
        self,
        store: DriversStore,
        known: Sequence[launch.Hello],
        patience: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        lifelines: Lifelines | None = None,
    ) -> None:
        self._store, self._known, self._patience, self._clock = store, known, patience, clock
        self._lifelines = lifelines
        self._far = [one for one in known if one.node != known[0].node]
        self._silences = {one.rank: Silence(clock) for one in self._far}
        self._lost: dict[int, str] = {}
        self._leaving, self._looked = 0, -SIGN_SECONDS

    def why_gone(self, rank: int) -> str:
        """Why the process of this rank is no longer there for the driver; "" while it is."""
        if rank not in self._silences:
            return "" if leftovers.is_living(self._known[rank].pid) else "torchrun's process of this rank is gone"
        self._look()
        return self._lost.get(rank, "")

    def is_torchrun_gone(self) -> bool:
        """Whether torchrun's store is gone, which nobody can be asked of any more then."""
        return bool(self._store.is_gone)

    def gone(self) -> tuple[int, ...]:
        """The ranks of this node whose process is gone."""
        return tuple(one.rank for one in self._known if one not in self._far and self.why_gone(one.rank))

    def lost(self) -> Mapping[int, str]:
        """Ranks of other nodes with which there is no contact any more, and why."""
        self._look()
        return self._lost

    def is_over(self) -> bool:
        """Whether torchrun's job cannot go on. Waits while another node is silent and not yet lost."""
        while not self.lost() and any(one.seconds > 2 * SIGN_SECONDS for one in self._silences.values()):
            time.sleep(SIGN_SECONDS / 10)
        return bool(self._lost or self.gone())

    def _look(self) -> None:
        if not self._far or self._clock() - self._looked < SIGN_SECONDS:
            return
        self._looked = self._clock()
        for rank, silence in self._silences.items():
            if silence.look(self._store.add(f"signs of {rank}", 0)) > self._patience:
                self._lost.setdefault(rank, f"nothing was heard of it for {self._patience:.0f} s")
        if (leaving := self._store.add("leaving", 0)) != self._leaving:
            self._leaving = leaving
            for rank in self._silences:
                if self._store.check([f"rank {rank} leaves"]):
                    self._lost.setdefault(rank, "torchrun told it to end")
        for rank in self._lifelines.ended() if self._lifelines is not None else ():
            self._lost.setdefault(rank, "its process has ended")
