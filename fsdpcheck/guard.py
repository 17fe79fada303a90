"""The outer process of a pytest session on somebody's implementation, which sees how the session ends.

An implementation can end its process (``os._exit(0)`` at its import, or in a rank by a name that it bound before), and
nothing that runs in that process would tell. So pytest forks before anything of the implementation is imported: the
child is the session, the parent waits, and turns a good end that came too early into a bad one. When the session is
over, what it has forked and left is ended.

Not guarded are sessions that a program starts by ``pytest.main``, the worker processes of pytest-xdist, whose loss
pytest-xdist reports, and processes that have threads or children already.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from fsdpcheck import leftovers

FAILED, USAGE = 1, 4
"""Exit codes of pytest."""
_BY_ITSELF: Final = ("pytest", "py.test", "__main__.py")
"""Names of the files that pytest is started by as a program."""
_FINISHED: Final = "finished"
_SET_PARENT_DEATH_SIGNAL: Final = 1


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
    child = os.fork()
    if child:
        os.close(write)
        released()
        with leftovers.adopting():
            _wait(child, read)
    os.close(read)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    return Guarded(write)


def _is_possible() -> bool:
    """Whether this is a process of pytest alone, in which a fork loses nothing."""
    tasks = Path("/proc/self/task")
    if not hasattr(os, "fork") or Path(sys.argv[0]).name not in _BY_ITSELF or not tasks.exists():
        return False
    return len(list(tasks.iterdir())) == 1 and not leftovers.children()


def _wait(child: int, pipe: int) -> NoReturn:
    """Wait for the session's process, end what it has left, and end as the session did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    leftovers.end_group_of_orphans(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(pipe, False)
    told = b""
    with suppress(BlockingIOError):
        while chunk := os.read(pipe, 1 << 16):
            told += chunk
    ending, words = judged(code, told.decode(errors="replace").splitlines())
    if words:
        os.write(2, words.encode())
    os._exit(ending)


def judged(code: int, told: list[str]) -> tuple[int, str]:
    """The exit code, and what is said, of a session whose process ended with ``code`` and had ``told`` so much."""
    last = told[-1] if told else "its start"
    if last.startswith(_FINISHED):
        return code or int(last.split()[1]), ""
    if code > 0:
        return code, ""
    how = f"with code {code}" if code == 0 else f"by signal {-code}"
    text = (
        f"\nfsdpcheck: the process of the session ended {how} before the session was finished\n"
        f"  got     its end during {last}\n  wanted  a session that comes to its end\n"
        "  next    look for os._exit, or a library that ends the process; `fsdpcheck run` keeps all other verdicts\n"
    )
    return (128 - code if code else USAGE if last.startswith("the import") else FAILED), text
