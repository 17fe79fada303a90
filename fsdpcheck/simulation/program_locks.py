"""Locks that a rank's program makes: a rank that waits for one gives up its turn, and who takes it first is decided.

A rank has one turn for all its threads. One of them may hold a lock of the program's while it waits for the turn; the
rank's own thread, which has the turn, must then not wait for the lock with it. In a run that is decided, a thread that
is about to take a lock comes to it as to a call (simulation/thread_order.py). Locks that Python or a library make stay
what they are.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fsdpcheck.compat import frames_private, torch_private
from fsdpcheck.simulation.current_rank import here
from fsdpcheck.simulation.turn import waiting


class ProgramLock:
    """A lock of one rank, as ``threading.Lock`` or ``threading.RLock`` make it. ``name``: the same in every run."""

    __slots__ = ("__weakref__", "_name", "_real")

    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, as the real one is taken. May raise Aborted."""
        if not blocking or timeout != -1:
            return bool(waiting(self._real.acquire, blocking, timeout))
        if here.number is None or self._is_mine():
            return bool(self._real.acquire())
        return self._taken_in_turn() or bool(waiting(self._real.acquire))

    def _taken_in_turn(self) -> bool:
        """Come to it in the order that is decided; whether it was free then."""
        own, borrowed = here.turn, here.borrowed
        if borrowed is not None and borrowed.is_decided:
            with borrowed.taken((self._name,), calls=False):
                return bool(self._real.acquire(False))
        if own is not None:
            own.call((self._name,))
        return bool(self._real.acquire(False))

    def _is_mine(self) -> bool:
        owned = getattr(self._real, "_is_owned", None)  # a lock that may be taken again has it
        return owned is not None and bool(owned())

    def release(self) -> None:
        """Let go of it. Raises RuntimeError if it is not taken."""
        self._real.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __repr__(self) -> str:
        return repr(self._real)

    def __reduce__(self) -> str:
        raise TypeError(f"cannot pickle {type(self._real).__name__!r} object")


@contextmanager
def locks_of_programs() -> Iterator[None]:
    """While open, the locks that a rank's program makes by ``threading.Lock`` and ``threading.RLock`` are such."""

    def ours(make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            turn = here.turn or here.borrowed
            if turn is None or not _is_of_a_program(sys._getframe(1)):
                return make()
            return ProgramLock(make(), turn.name_of_a_lock())

        return made

    with torch_private.replaced(threading, Lock=ours(threading.Lock), RLock=ours(threading.RLock)):
        yield


def _is_of_a_program(frame: FrameType | None) -> bool:
    """Whether the code that this frame runs is the program's; what is generated counts for who calls it."""
    while frame is not None and frame.f_code.co_filename.startswith("<"):
        frame = frame.f_back
    if frame is None or "-packages" in frame.f_code.co_filename:
        return False
    return frames_private.is_a_program(frame.f_code.co_filename)
