"""What a run has used up, for runs that never come back: processor time, and time in which no rank used any.

The limit is no verdict on how fast a rank is: a rank that computes, on however slow or crowded a machine, uses up its
own processor time and nothing else, and one that waits for its turn on a processor is not asleep. Only a rank that
sleeps through a look, and has used no processor time since the look before, is charged with the time in between: this
is what ends a rank that waits for what never comes (a socket, a timer of years). It is "no progress", never a hang.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

from fsdpcheck.errors import UsageError


def limit_seconds() -> float:
    """What a run may use up at least: 600, or what the environment says now in FSDPCHECK_LIMIT_SECONDS.

    Asked for each time: a process that was forked has another environment than its modules were imported in.
    """
    given = os.environ.get("FSDPCHECK_LIMIT_SECONDS", "600")
    try:
        return float(given)
    except ValueError:
        raise UsageError(f"FSDPCHECK_LIMIT_SECONDS is {given!r}; wanted a number of seconds") from None


TIMES_THE_LONGEST: Final = 20.0
"""A run may use up so many times what the longest one before it did."""
LOOK_SECONDS: Final = 0.1
"""From one look to the next."""


class Limit:
    """How much a run of one engine may use up: ``floor`` seconds, or many times what the longest one before it did.

    ``floor``: that of ``limit_seconds`` if None.
    """

    def __init__(self, floor: float | None = None, times: float = TIMES_THE_LONGEST) -> None:
        floor = limit_seconds() if floor is None else floor
        self._floor, self._times, self._longest = floor, times, 0.0

    @property
    def seconds(self) -> float:
        return max(self._floor, self._times * self._longest)

    def learn(self, seconds: float) -> None:
        """A run came to its end and had used so much."""
        self._longest = max(self._longest, seconds)


class Spent:
    """What one run has used up so far.

    ``processor``: seconds of processor time of all that belongs to it. ``ranks``: something that changes when any of
    its ranks has moved or used processor time.
    """

    def __init__(
        self, limit: Limit, processor: Callable[[], float], ranks: Callable[[], Hashable], pause: float = LOOK_SECONDS
    ) -> None:
        """``pause``: seconds from one look to the next."""
        self._limit, self._processor, self._ranks, self._pause = limit, processor, ranks, pause
        self._began, self._asleep = processor(), 0.0
        self._seen: Hashable = None
        self._looked = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._processor() - self._began + self._asleep

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() - self._looked >= self._pause

    def look(self) -> bool:
        """Look again; whether every rank has been asleep since the look before."""
        _beat()
        now, seen = time.monotonic(), self._ranks()
        slept = seen == self._seen
        if slept:  # however long nobody looked (a stopped process), it is one look
            self._asleep += min(now - self._looked, 2 * self._pause)
        self._seen, self._looked = seen, now
        return slept

    @property
    def exceeded(self) -> str:
        """What is said when the limit is exceeded; "" while it is not."""
        if self.seconds <= self._limit.seconds:
            return ""
        return (
            f"{self.seconds - self._asleep:.0f} s of processor time and {self._asleep:.0f} s in which no rank used any"
            f" are more than the {self._limit.seconds:.0f} s that a run may use up"
        )


_beats, _into = itertools.count(), -1


def beat_into(descriptor: int) -> None:
    """From now on note in a file, at each look, that Python goes on in this process: see ``life_of``."""
    global _into
    _into = descriptor


def _beat() -> None:
    if _into >= 0:
        os.pwrite(_into, b"%d" % next(_beats), 0)


def life_of(pid: int, beats: int) -> Hashable:
    """Something that is the same twice only if a process neither looked, nor used a processor, nor waited for one.

    ``beats``: the file that it notes its looks in. Its main thread alone tells nothing: while C code sleeps and lets no
    Python run (it keeps the interpreter's lock), all other threads ask for the lock two hundred times a second. Whole
    seconds: what they use by this is less than a hundredth of the time.
    """
    try:
        busy = sum(map(_busy, Path(f"/proc/{pid}/task").iterdir()))
    except OSError:  # it is gone, or the system does not tell
        return f"awake {time.monotonic_ns()}"
    return os.pread(beats, 32, 0), busy // 10**9


def _busy(task: Path) -> int:
    """Nanoseconds that a thread was on a processor or waited for one; 0 of one that has ended."""
    try:
        return sum(map(int, (task / "schedstat").read_bytes().split()[:2]))
    except OSError:
        return 0


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used so far; 0 for one that is gone, and where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def sleep_of(task: str) -> str:
    """Something that is the same twice only if the thread of the folder ``task`` of /proc slept in between."""
    try:
        with open(f"{task}/schedstat", encoding="ascii") as clock, open(f"{task}/stat", encoding="utf-8") as stat:
            if (
                stat.read().rpartition(")")[2].split()[0] in "SDTt"
            ):  # a stopped thread moves no more than a sleeping one
                return clock.read().split()[0]
    except OSError:  # it is gone, or the system does not tell: nothing is known of its sleep
        pass
    return f"awake {time.monotonic_ns()}"
