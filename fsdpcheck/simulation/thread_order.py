"""Which thread of a rank calls first, where two of them are about to make calls whose order they share.

Calls on one group are numbered as they come, and so are messages of one way and tag: of two threads of a rank that each
make one, either may be first, unless the program itself holds one of them back. In a run that is decided, a thread that
is about to make such a call waits until all other threads of its rank have come to a call of their own, or stand still
in a lock, a queue or a join; each that has come to a call of the same kind could then be first, and one is chosen. So
no thread is ever put before another that the program makes it wait for.

A rank's own thread that another thread has woken goes on before any of them calls; in an order that is `LATE`, after
they have called whatever they can without it. Such an order shows a buffer that a thread hands over and overwrites.

Not tried: an order in which a thread makes a second call, or one for which it first needs what another rank does,
before the first of another; and what else threads do to each other between calls. Both are voids (stragglers.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fsdpcheck.simulation.decisions import LATE, Access, Decisions, Option, Woken
from fsdpcheck.simulation.waits import stands

NOT_SETTLED: Final = "a thread of a rank computed, slept or waited with a time-out while another called"
_LOOKS: Final = 4000
"""At a thread that goes on computing."""
_IDLE: Final = 100
"""Looks in a row that find a thread as it was, asleep in something that ends by itself."""
_PAUSE: Final = 0.0005
"""Seconds between two looks, in which others run."""
_wait, _sleep = threading.Condition.wait, time.sleep


@dataclass(frozen=True, eq=False)
class Caller:
    """A thread that is about to make a call. ``thread``: its name in every run; ``shared``: what the order is of.

    ``woken``: it is the rank's own, and has waited for something instead.
    """

    thread: str
    shared: tuple[Hashable, ...]
    where: str
    woken: bool = False


class TurnLock:
    """The lock of a rank's turn; whoever lets go of it may say who is next."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._is_taken = True
        self._next: object = None
        self.wanted = 0
        """How many threads wait for it, beside those that must be told."""

    def acquire(self, caller: Caller | None = None) -> bool:
        """Wait for it; whether this caller was said to be next."""
        with self._condition:
            self.wanted += 1
            while self._is_taken or (self._next is not None and self._next is not caller):
                _wait(self._condition)
            self.wanted -= 1
            self._is_taken, chosen = True, self._next is not None
            self._next = None
            return chosen

    def wait_to_be_told(self, me: object) -> None:
        """Wait until somebody lets go of it and says that this one is next."""
        with self._condition:
            while self._is_taken or self._next is not me:
                _wait(self._condition)
            self._is_taken, self._next = True, None

    def release(self, following: object = None) -> None:
        with self._condition:
            self._is_taken, self._next = False, following
            self._condition.notify_all()


class Standstill:
    """Waits until other threads of a rank have come to a stand."""

    def __init__(self) -> None:
        self._gives_up = False

    def reached(self, threads: Callable[[], Iterable[int]]) -> bool:
        """Wait until none of them moves; False if that cannot be waited for. ``threads``: their system's numbers."""

        def look() -> list[tuple[bool, str]]:
            return [stands(Path(f"/proc/self/task/{task}")) for task in list(threads())]

        idle, before = 0, look()
        for _ in range(0 if self._gives_up else _LOOKS):
            now = look()
            if all(still for still, _ in now) and now == before:
                return True
            idle, before = idle + 1 if now == before else 0, now
            if idle > _IDLE:
                break
            _sleep(_PAUSE)
        self._gives_up = True
        return False


class ThreadOrder:
    """The order of calls among the threads of one rank, in a run that is decided."""

    def __init__(self, rank: int, decisions: Decisions, lock: TurnLock) -> None:
        self._rank, self._decisions, self._lock = rank, decisions, lock
        self._coming: list[Caller] = []

    def comes(self, caller: Caller) -> None:
        """A thread is about to call, and waits for the turn."""
        self._coming.append(caller)

    def goes(self, caller: Caller) -> None:
        """It has the turn."""
        self._coming.remove(caller)

    def let_others_go_first(self, me: Caller, settled: Callable[[], bool]) -> None:
        """With the turn: until it is decided that this caller is next. ``settled`` waits until no other moves."""
        while settled():
            chosen = self._next(me, sorted([*self._coming, me], key=lambda caller: caller.thread))
            if chosen is me:
                return
            self._lock.release(chosen)
            self._lock.acquire()

    def _next(self, me: Caller, here: Sequence[Caller]) -> Caller:
        woken = [caller for caller in here if caller.woken]
        callers = [caller for caller in here if not caller.woken]
        if woken and (not callers or not self.is_late):
            return woken[0]
        if woken:
            self._decisions.woken.append(Woken(self._rank, woken[0].where, callers[0].where, callers[0].thread))
        rivals = [caller for caller in callers if caller.shared == me.shared]
        return self._chosen(rivals) if len(rivals) > 1 else callers[0]  # as in every run, if it does not matter

    @property
    def is_late(self) -> bool:
        """Whether a rank's own thread that was woken goes on after the others."""
        return LATE in self._decisions.rules

    def _chosen(self, callers: Sequence[Caller]) -> Caller:
        what = " ".join(str(part) for part in callers[0].shared)
        name = self._decisions.name(self._rank, f"first of its threads at {what}")
        chosen: list[Caller] = []

        def option(caller: Caller) -> Option:
            access = Access(self._rank, ("threads", self._rank, *caller.shared), True, caller.where)
            return Option(name, f"{name}: {caller.thread}", access, lambda: chosen.append(caller))

        self._decisions.decide([option(caller) for caller in callers])
        return chosen[0]
