"""The outer process of a pytest session on somebody's implementation, which sees how the session ends.

An implementation can end its process (``os._exit(0)`` at its import, or in a rank by a name that it bound before), and
nothing that runs in that process would tell. So pytest forks before anything of the implementation is imported: the
child is the session, the parent waits, and turns a good end that came too early into a bad one. When the session is
over, what it has forked and left is ended, as after `fsdpcheck run`: daemons in sessions of their own too.

Not guarded are sessions that a program starts by ``pytest.main``, the worker processes of pytest-xdist, whose loss
pytest-xdist reports, and processes that have threads or children already.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from fsdpcheck.processes import leftovers
from fsdpcheck.processes.limit import LIMIT_SECONDS, Limit, Spent, beat_into, life_of, processor_seconds
from fsdpcheck.session.child_process import MORE_THAN_A_RUN

FAILED, USAGE = 1, 4
"""Exit codes of pytest."""
_BY_ITSELF: Final = ("pytest", "py.test", "__main__.py")
"""Names of the files that pytest is started by as a program."""
_FINISHED: Final = "finished"
_SET_PARENT_DEATH_SIGNAL: Final = 1
_LOOK_SECONDS: Final = 5.0
"""From one look at the session's process to the next."""
_LEAVING_SECONDS: Final = 10.0
"""How long the process of a finished session may take to end; no verdict depends on it."""
_STACK_SECONDS: Final = 2.0
"""How long stacks are waited for."""


class Guarded:
    """The session's side: tells the guard what it is at, and that it has finished."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def at(self, what: str) -> None:
        """What would be to blame if the session ended now."""
        self._tell(what)

    def finished(self, code: int) -> None:
        """The session has its exit code; from now on the process may end at any time."""
        self._tell(f"{_FINISHED} {code}")

    def _tell(self, words: str) -> None:
        with suppress(OSError):
            os.write(self._pipe, words.replace("\n", " ").encode() + b"\n")


def guarded(released: Callable[[], object]) -> Guarded | None:
    """Fork: returns in the child, whose parent waits for it and ends as it does; None where that is not possible.

    ``released`` is called in the parent, and gives it the standard streams back.
    """
    if not _is_possible():
        return None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    read, write = os.pipe()
    stacks, beats = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - open while both processes live
    child = os.fork()
    if child:
        os.close(write)
        released()
        with leftovers.adopting():
            _Session(child, read, stacks.fileno(), beats.fileno()).wait()
    os.close(read)
    faulthandler.register(signal.SIGUSR2, stacks)
    beat_into(os.dup(beats.fileno()))
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    return Guarded(write)


def _is_possible() -> bool:
    """Whether this is a process of pytest alone, in which a fork loses nothing."""
    tasks = Path("/proc/self/task")
    if not hasattr(os, "fork") or Path(sys.argv[0]).name not in _BY_ITSELF or not tasks.exists():
        return False
    return len(list(tasks.iterdir())) == 1 and not leftovers.children()


class _Session:
    """The guard's side: one child, what it has told, and what it has used up since."""

    def __init__(self, child: int, pipe: int, stacks: int, beats: int) -> None:
        self._child, self._pipe, self._stacks, self._beats = child, pipe, stacks, beats
        self._told: list[str] = []
        self._why, self._until = "", float("inf")
        os.set_blocking(pipe, False)
        self._begin_anew()

    def wait(self) -> NoReturn:
        """Wait for the session's process, end what it has left, and end as the session did."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(self._child, number))
        ended, poll = os.pidfd_open(self._child), select.poll()
        for source in (ended, self._pipe):
            poll.register(source, select.POLLIN)
        while ended not in (ready := dict(poll.poll(1000 * _LOOK_SECONDS))):
            if self._pipe in ready and not self._hear():
                poll.unregister(self._pipe)
            self._look()
        self._hear()
        leftovers.end_orphans(self._child)
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        ending, words = judged(code, self._told, self._why)
        if words:
            os.write(2, words.encode())
        os._exit(ending)

    def _hear(self) -> bool:
        """Read what it has told; False at the end of the pipe."""
        told, chunk = b"", b"-"
        with suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 1 << 16):
                told += chunk
        if told:
            self._told = told.decode(errors="replace").splitlines()[-1:]
            self._begin_anew()
            if self._told[0].startswith(_FINISHED):
                self._until = time.monotonic() + _LEAVING_SECONDS
        return bool(chunk)

    def _begin_anew(self) -> None:
        child, beats, limit = self._child, self._beats, Limit(MORE_THAN_A_RUN * LIMIT_SECONDS)
        self._spent = Spent(limit, lambda: processor_seconds(child), lambda: life_of(child, beats), _LOOK_SECONDS)

    def _look(self) -> None:
        """Set it going again if something in it has stopped it; end it if it never came back, or does not leave."""
        with suppress(ChildProcessError):  # it has ended since the poll, and what has ended cannot have stopped
            if os.waitid(os.P_PID, self._child, os.WSTOPPED | os.WNOHANG) is not None:
                os.kill(self._child, signal.SIGCONT)
        if self._spent.is_due:
            self._spent.look()
        if why := self._spent.exceeded:
            self._why = f"{why}\n{self._told_stacks()}"
        if why or time.monotonic() > self._until:
            os.kill(self._child, signal.SIGKILL)

    def _told_stacks(self) -> str:
        os.kill(self._child, signal.SIGUSR2)
        until = time.monotonic() + _STACK_SECONDS
        while not (told := os.pread(self._stacks, 1 << 16, 0)).endswith(b"in <module>\n") and time.monotonic() < until:
            time.sleep(_STACK_SECONDS / 100)
        return told.decode(errors="replace").rstrip()


def judged(code: int, told: list[str], why: str = "") -> tuple[int, str]:
    """The exit code, and what is said, of a session whose process ended with ``code`` and had ``told`` so much.

    ``why``: what it had used up when it was ended because it never came back.
    """
    last = told[-1] if told else "its start"
    if last.startswith(_FINISHED):
        return code if code > 0 else int(last.split()[1]), ""
    if why:
        return FAILED, f"\nfsdpcheck: no progress during {last}: {why}\n"
    if code > 0:
        return code, ""
    how = f"with code {code}" if code == 0 else f"by signal {-code}"
    text = (
        f"\nfsdpcheck: the process of the session ended {how} before the session was finished\n"
        f"  got     its end during {last}\n  wanted  a session that comes to its end\n"
        "  next    look for os._exit, or a library that ends the process; `fsdpcheck run` keeps all other verdicts\n"
    )
    return (128 - code if code else USAGE if last.startswith("the import") else FAILED), text
