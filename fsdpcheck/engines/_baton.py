"""The baton: W rank threads of which exactly one runs, and a deadlock is known the moment none can.

A rank keeps the baton until it blocks or ends; who is next is the schedule's choice among those that can run, a pure
function of their numbers. Nothing here waits for time to pass.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

from fsdpcheck import torch_private
from fsdpcheck.execution import SchedulePolicy

Choose = Callable[[Sequence[int]], int]
CHOICES: dict[SchedulePolicy, Choose] = {"forward": min, "reversed": max}


class Aborted(BaseException):
    """Unwinds a rank whose run has already failed. Not an Exception: programs must not swallow it."""


class Baton:
    """Hands the right to run from rank to rank.

    ``stuck`` is called once, on the last rank that blocked, when ranks are blocked and none can run. After it, or after
    ``abort``, every rank that gets the baton raises Aborted out of ``block`` until all have ended.
    """

    def __init__(
        self,
        world_size: int,
        choose: Choose,
        leave: Callable[[int], None],
        enter: Callable[[int], None],
        stuck: Callable[[float], None],
    ) -> None:
        self._choose, self._leave, self._enter, self._stuck = choose, leave, enter, stuck
        self._locks = [threading.Lock() for _ in range(world_size)]
        for lock in self._locks:
            lock.acquire()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._ready, self._alive = set(range(world_size)), set(range(world_size))
        self._threads: dict[int, int] = {}
        self.aborting = False
        self.hand_overs = 0

    def begin(self) -> None:
        """Give the baton to the first rank; called from outside."""
        self._locks[self._choose(sorted(self._ready))].release()

    def join(self, seconds: float | None) -> bool:
        """Wait until all ranks have ended; False when the user's budget of ``seconds`` ran out first."""
        return self._ended.acquire(timeout=-1 if seconds is None else seconds)

    def start(self, rank: int) -> None:
        """First thing on a rank's thread: wait for the baton. May raise Aborted."""
        self._threads[rank] = threading.get_ident()
        self._locks[rank].acquire()
        self._enter(rank)
        if self.aborting:
            raise Aborted

    def block(self, rank: int) -> None:
        """Pass the baton on and return when ``wake`` was called for this rank and it is its turn. May raise Aborted."""
        self._ready.discard(rank)
        self._pass_on(rank)
        if self.aborting:
            raise Aborted

    def pause(self, rank: int) -> None:
        """Let the other ranks run as far as they can, then go on: for programs that poll."""
        others = sorted(self._ready - {rank})
        if others and not self.aborting:
            self._give(rank, self._choose(others))
        if self.aborting:
            raise Aborted

    def wake(self, rank: int) -> None:
        self._ready.add(rank)

    def end(self, rank: int) -> None:
        """Last thing on a rank's thread in a run."""
        self._leave(rank)
        self._ready.discard(rank)
        self._alive.discard(rank)
        if not self._alive:
            self._ended.release()
            return
        following = self._next()
        self.hand_overs += 1
        self._locks[following].release()

    @property
    def all_ended(self) -> bool:
        return not self._alive

    def abort(self) -> None:
        """From now on every rank that gets the baton raises Aborted."""
        self.aborting = True

    def release(self) -> None:
        """Let go of the run after all ranks have ended: it and the baton hold each other, and need no collector now."""
        del self._leave, self._enter, self._stuck

    def frame(self, rank: int) -> FrameType | None:
        """Where a rank that does not hold the baton stands."""
        return sys._current_frames().get(self._threads.get(rank, -1))

    def _pass_on(self, rank: int) -> None:
        following = self._next()
        if following != rank:
            self._give(rank, following)

    def _next(self) -> int:
        if not self._ready and not self.aborting:
            since = time.perf_counter()
            self.aborting = True
            self._stuck(since)
        return self._choose(sorted(self._alive if self.aborting else self._ready))

    def _give(self, rank: int, following: int) -> None:
        self.hand_overs += 1
        self._leave(rank)
        self._locks[following].release()
        self._locks[rank].acquire()
        self._enter(rank)


def place(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """(file:line of the innermost frame outside torch and fsdpcheck's own plumbing, the whole stack as text lines)."""
    where = ""
    current = frame
    while current is not None and not where:
        if not torch_private.is_plumbing(current.f_code.co_filename):
            where = f"{current.f_code.co_filename}:{current.f_lineno}"
        current = current.f_back
    return where, tuple(line.rstrip() for line in traceback.format_stack(frame)) if frame is not None else ()
