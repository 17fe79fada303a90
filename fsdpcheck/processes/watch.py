"""Watch: whether a process still goes on, from outside, and where its threads stand when it does not."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final

from fsdpcheck.processes.limit import Limit, Spent, life_of, processor_seconds

STACKS: Final = signal.SIGUSR2
"""On it a watched process writes the stacks of its threads into its file of stacks."""
MORE_THAN_A_RUN: Final = 3.0
"""How much more a process may use up between two messages than an engine lets a run use up, which tells more of it.

This is for all else: an import that never ends, C code that never lets Python run."""
_STACK_SECONDS: Final = 2.0
_GLANCE_SECONDS: Final = 0.01
"""How long its stacks are waited for, and how often looked for; they decorate a verdict and make none."""
_CHUNK: Final = 1 << 16


class Watch:
    """Counts what the process ``pid`` uses up from now on. ``beats`` and ``stacks``: descriptors of files it writes.

    ``pause``: seconds from one look to the next.
    """

    def __init__(self, pid: int, limit: Limit, beats: int, stacks: int, pause: float) -> None:
        self._pid, self._stacks = pid, stacks
        self._spent = Spent(limit, lambda: processor_seconds(pid), lambda: life_of(pid, beats), pause)

    @property
    def seconds(self) -> float:
        """What it has used up so far."""
        return self._spent.seconds

    def never_came_back(self) -> str:
        """Why it should be ended, with its stacks; "" while it may go on."""
        if not self._spent.is_due:
            return ""
        self._spent.look()
        why = self._spent.exceeded
        return f"no progress: {why}\n{self._told_stacks()}" if why else ""

    def _told_stacks(self) -> str:
        """Where its threads are; C code that never lets Python run does not keep it from telling."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, STACKS)
        until = time.monotonic() + _STACK_SECONDS
        while not (told := os.pread(self._stacks, _CHUNK, 0)).endswith(b"in <module>\n"):
            if time.monotonic() > until:
                break
            time.sleep(_GLANCE_SECONDS)
        return told.decode(errors="replace").rstrip()
