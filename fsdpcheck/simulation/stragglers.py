"""Stragglers: threads and tasks of ranks that go on when the ranks' programs have returned.

A process does not end before its threads have, daemons aside, so they are waited for: what they still compute or call
belongs to the run. But an implementation has no way to be told that its training is over, so one that feeds a thread
through a queue, or whose thread sleeps, would be waited for until its limit. Stragglers of a rank are left alone, and
told with the verdict, when

- no thread of this process can move at all (simulation/waits.py): nobody could wake them on a real rank either;
or
- every rank's program has returned, no straggler of any rank has called a collective, and this rank's have slept
  through a look. From then on none of them may call: one that woke up late would find that the others are gone.

Which of them sleeps long enough to be told may differ from run to run; no verdict does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Protocol

from fsdpcheck.processes.limit import sleep_of
from fsdpcheck.simulation.waits import nobody_moves

if TYPE_CHECKING:
    from fsdpcheck.simulation.scheduler import Baton

VOID = "a thread that a rank started called a collective"


class Waiting(Protocol):
    """A rank whose program has returned, and which waits for its stragglers."""

    @property
    def running(self) -> Mapping[int, str]:
        """By the system's number of the thread, what it is, in words."""

    @property
    def has_begun(self) -> bool:
        """Whether each of them has come as far as to run."""

    def look_again(self, *, may_leave: bool) -> None:
        """Wake the rank's own thread. ``may_leave``: it may ask to leave them alone."""


class Stragglers:
    """Those of one run, on all its ranks. ``over``: from now on no straggler may call a collective."""

    def __init__(self, baton: Baton, voids: set[str], nobody_moves: Callable[[], bool] = nobody_moves) -> None:
        self._baton, self._voids, self._nobody_moves = baton, voids, nobody_moves
        self.returned: set[int] = set()
        """Ranks whose program has returned."""
        self.left: dict[str, set[int]] = {}
        """Those that were left alone, in words, and the ranks that had started them."""
        self.over = False
        self._waiting: dict[int, Waiting] = {}
        self._slept: Hashable = None
        self._still = False
        """Whether it was seen that no thread can move."""

    def wait(self, rank: int, waiting: Waiting) -> None:
        """Note that a rank waits, for ``look``."""
        self._waiting[rank] = waiting

    def leave(self, rank: int) -> bool:
        """In the rank's turn, when its stragglers are in no call: whether they are left as they are, and told."""
        silent = self._silent
        if not silent and not self._still:
            return False
        self.over |= silent
        for what in list(self._waiting.pop(rank).running.values()):
            self.left.setdefault(what, set()).add(rank)
        return True

    @property
    def _silent(self) -> bool:
        """Whether every rank's program has returned and no straggler has called a collective."""
        return self._baton.alive <= self.returned and VOID not in self._voids

    def look(self) -> bool:
        """From outside, while all ranks are asleep: whether the rank whose turn it is waits for stragglers in vain.

        If so it is woken, now or at one of the next looks.
        """
        rank = self._baton.holder
        waiting = self._waiting.get(rank)
        if waiting is None:
            return False
        others = self._baton.others_ready(rank, self.returned)
        if others or self._silent:
            if self._sleep_through(waiting):
                waiting.look_again(may_leave=not others)
            return True
        self._still = self._nobody_moves()
        if self._still:
            waiting.look_again(may_leave=True)
        return self._still

    def told(self, rank: int) -> str:
        """What a rank that waits for stragglers does, in words; "" for any other."""
        waiting = self._waiting.get(rank)
        those = ", ".join(list(waiting.running.values())) if waiting is not None else ""
        return f"its program has returned, and it waits for {those}" if those else ""

    def _sleep_through(self, waiting: Waiting) -> bool:
        """Whether they have all been asleep since the look before."""
        now = tuple((task, sleep_of(f"/proc/self/task/{task}")) for task in sorted(list(waiting.running)))
        slept, self._slept = waiting.has_begun and now == self._slept, now
        return slept
