"""The baton: W rank threads of which exactly one runs, and a deadlock is known the moment none can.

A rank keeps the baton until it blocks or ends; who is next is the schedule's choice among those that can run, a pure
function of their numbers. Nothing here waits for time to pass.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from fsdpcheck.compat import frames_private
from fsdpcheck.execution import SchedulePolicy

Choose = Callable[[Sequence[int]], int]
CHOICES: dict[SchedulePolicy, Choose] = {"forward": min, "reversed": max}


_OFTEN = 100
"""How often a rank may swallow Aborted, and go on to a further call, before it is abandoned."""


class Aborted(BaseException):
    """Unwinds a rank whose run has already failed. Not an Exception: programs must not swallow it."""


class Baton:
    """Hands the right to run from rank to rank.

    ``stuck`` is called on the last rank that blocked, when ranks are blocked and none can run. Unless it returns that
    it has woken some, and after ``abort``, every rank that gets the baton raises Aborted out of ``block`` until all
    have ended. One that swallows it time and again is abandoned: its thread stands still for ever and counts as ended.
    """

    def __init__(
        self,
        world_size: int,
        choose: Choose,
        leave: Callable[[int], None],
        enter: Callable[[int], None],
        stuck: Callable[[float], bool],
    ) -> None:
        self.choose, self._leave, self._enter, self._stuck = choose, leave, enter, stuck
        self._locks = [threading.Lock() for _ in range(world_size)]
        for lock in self._locks:
            lock.acquire()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._ready, self.alive = set(range(world_size)), set(range(world_size))
        self._threads: dict[int, int] = {}
        self.tasks: dict[int, str] = {}
        """Where the system tells of each rank's thread."""
        self.holder = -1
        """The rank that runs, or ran last."""
        self.abandoned: set[int] = set()
        self._unwound = [0] * world_size
        self._disowned = False
        self.aborting = False
        self.hand_overs = 0

    def begin(self) -> None:
        """Give the baton to the first rank; called from outside."""
        self._locks[self.choose(sorted(self._ready))].release()

    def join(self, seconds: float) -> bool:
        """Wait until all ranks have ended, ``seconds`` long at most; whether they have."""
        return self._ended.acquire(timeout=seconds)

    def start(self, rank: int) -> None:
        """First thing on a rank's thread: wait for the baton. May raise Aborted."""
        self._threads[rank] = threading.get_ident()
        self.tasks[rank] = f"/proc/self/task/{threading.get_native_id()}"
        self._locks[rank].acquire()
        self.holder = rank
        self._enter(rank)
        if self.aborting:
            self._unwind(rank)

    def block(self, rank: int) -> None:
        """Pass the baton on and return when ``wake`` was called for this rank and it is its turn. May raise Aborted."""
        self._ready.discard(rank)
        self._pass_on(rank)
        if self.aborting:
            self._unwind(rank)

    def stands(self, rank: int, thread: int, task: int) -> None:
        """From now on this thread, which has these numbers for Python and for the system, is the rank."""
        self._threads[rank], self.tasks[rank] = thread, f"/proc/self/task/{task}"

    def pause(self, rank: int) -> None:
        """Let the other ranks run as far as they can, then go on: for programs that poll."""
        others = sorted(self._ready - {rank})
        if others and not self.aborting:
            self._give(rank, self.choose(others))
        if self.aborting:
            self._unwind(rank)

    def others_ready(self, rank: int, but: set[int]) -> list[int]:
        """The ranks beside ``rank`` and those of ``but`` that can run."""
        return sorted(self._ready - but - {rank})

    def pass_to(self, rank: int, others: Sequence[int]) -> None:
        """Let one of ``others``, which can run, go on before ``rank`` does. May raise Aborted."""
        self._give(rank, self.choose(others))
        if self.aborting:
            self._unwind(rank)

    def wake(self, rank: int) -> None:
        self._ready.add(rank)

    def end(self, rank: int) -> None:
        """Last thing on a rank's thread in a run."""
        self._stand_still_if_disowned()
        self._leave(rank)
        self._ready.discard(rank)
        self.alive.discard(rank)
        if not self.alive:
            self._ended.release()
            return
        following = self._next()
        self.hand_overs += 1
        self._locks[following].release()

    @property
    def all_ended(self) -> bool:
        return not self.alive

    def abort(self) -> None:
        """From now on every rank that gets the baton raises Aborted."""
        self.aborting = True

    def disown(self) -> None:
        """Nobody waits for these ranks any more: each stands still where it next comes to the baton.

        They share their process with later runs, whose global state they must not touch.
        """
        self.aborting = self._disowned = True

    def release(self) -> None:
        """Let go of the run after all ranks have ended: it and the baton hold each other, and need no collector now."""
        del self._leave, self._enter, self._stuck

    def frame(self, rank: int) -> FrameType | None:
        """Where a rank that does not hold the baton stands."""
        return sys._current_frames().get(self._threads.get(rank, -1))

    def rank_of(self, thread: int) -> int | None:
        """The rank whose thread has this identity."""
        return next((rank for rank, own in self._threads.items() if own == thread), None)

    def _unwind(self, rank: int) -> NoReturn:
        self._stand_still_if_disowned()
        self._unwound[rank] += 1
        if self._unwound[rank] > _OFTEN:
            self.abandoned.add(rank)
            self.end(rank)
            _stand_still()
        raise Aborted

    def _stand_still_if_disowned(self) -> None:
        if self._disowned:
            _stand_still()

    def _pass_on(self, rank: int) -> None:
        following = self._next()
        if following != rank:
            self._give(rank, following)

    def _next(self) -> int:
        if not self._ready and not self.aborting:
            self.aborting = not self._stuck(time.perf_counter())
        return self.choose(sorted(self.alive if self.aborting else self._ready))

    def _give(self, rank: int, following: int) -> None:
        self._stand_still_if_disowned()
        self.hand_overs += 1
        self._leave(rank)
        self._locks[following].release()
        self._locks[rank].acquire()
        self.holder = rank
        self._enter(rank)


def _stand_still() -> NoReturn:
    """Keep this thread where it is for ever, asleep; it is a daemon, and ends with its process."""
    for lock in itertools.repeat(threading.Lock()):
        lock.acquire()
    raise AssertionError


def place(frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """(file:line of the innermost frame outside torch and fsdpcheck's own plumbing, the whole stack as text lines)."""
    return where(frame), tuple(line.rstrip() for line in traceback.format_stack(frame)) if frame is not None else ()


def where(frame: FrameType | None) -> str:
    """file:line of the innermost frame outside torch and fsdpcheck's own plumbing; "" if there is none."""
    while frame is not None:
        if not frames_private.is_plumbing(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
