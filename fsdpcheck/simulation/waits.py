"""Whether any thread of this process can still move: a proof from two equal looks at all of them, and no clock.

A thread that is in the system call futex without a time-out moves only when another thread of the process wakes it. If
*all* threads are in such a wait, none ever will. The looks are not taken at one instant, so each reads, with the wait,
how often the thread has been put to sleep so far: when a second look at all threads equals the first, no thread has run
between the two readings of it, and between the two looks all of them waited at once.

Left out of the looks are the thread that looks and those that were there before this module was imported, which is
before an implementation is: they belong to the harness or its host and wake nothing of an implementation's. So do
those that serve a TCPStore, of real ranks of this process say: they answer through sockets, and nobody in a futex; and
the one that torch's profiler starts for good.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fsdpcheck.compat import groups_private, interpreter_private

_TASKS: Final = Path("/proc/self/task")
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_TIME_OUT: Final = 4
"""Which word of /proc/self/task/ID/syscall is the time-out of a futex: the call's number is word 0."""
_HARNESS: Final = ("watch parent", "watch child")


def _tasks() -> frozenset[str]:
    return frozenset(task.name for task in _TASKS.iterdir()) if _TASKS.exists() else frozenset()


_NOT_OF_RANKS: Final = set(_tasks())


@contextmanager
def starts_threads_of_the_harness() -> Iterator[None]:
    """Threads that begin while this is open, and nothing else runs, wake nothing of an implementation's either."""
    before = _tasks()
    yield
    _NOT_OF_RANKS.update(_tasks() - before)


def nobody_moves() -> bool:
    """Whether no thread but the harness's can ever move again. False where that cannot be known."""
    first = _look()
    return first is not None and first == _look()


def stands(task: Path) -> tuple[bool, str]:
    """Whether a thread waits for others of this process without a time-out, or has ended; and how often it has slept.

    What stands so in two looks, none of which finds another that moves, has not moved between them.
    """
    try:
        words = (task / "syscall").read_text().split()
        switches = [line for line in (task / "status").read_text().splitlines() if "ctxt_switches" in line]
    except OSError:  # it has ended
        return True, ""
    return _waits_for_others(words), f"{words} {switches}"


def _waits_for_others(words: Sequence[str]) -> bool:
    """Whether a thread is in a futex without a time-out, by the words of its system call.

    Not so one that hands over the interpreter's lock: it goes on by itself.
    """
    if len(words) <= _TIME_OUT or words[0] != str(_FUTEX) or int(words[_TIME_OUT], 16):
        return False
    return int(words[1], 16) not in interpreter_private.memory()


def _look() -> dict[str, str] | None:
    """Of each thread the wait it is in and how often it went to sleep; None when one does not wait for another."""
    ours = {str(thread.native_id) for thread in threading.enumerate() if thread.name in _HARNESS}
    found: dict[str, str] = {}
    try:
        for task in _tasks() - _NOT_OF_RANKS - ours - {str(threading.get_native_id())}:
            if (_TASKS / task / "comm").read_text().strip() == groups_private.STORE_SERVER:
                continue
            words = (_TASKS / task / "syscall").read_text().split()
            if not _waits_for_others(words):
                return None
            status = (_TASKS / task / "status").read_text()
            found[task] = f"{words} {[line for line in status.splitlines() if 'ctxt_switches' in line]}"
    except OSError:  # it ended meanwhile, or the system does not tell
        return None
    return found or None
