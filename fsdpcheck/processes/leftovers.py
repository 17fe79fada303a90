"""What a session would leave behind on the machine: processes and temporary folders, found by a mark, and removed.

A process is of a session if it is in the session or process group of the process that the session started, if its
environment at its start held the session's mark (children inherit it), or if it was orphaned meanwhile and came to this
process (``adopting``). What escapes is a program that forks twice into a session of its own with another environment,
on a system without Linux' child subreapers. Where there is no /proc, whole process groups are ended and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Final, NamedTuple

MARK: Final = "FSDPCHECK_SESSION"
"""Name of the environment variable that holds the mark of a session."""
ROOM: Final = "-" * 64
"""What that variable holds at first where ``mark`` will write another in its place."""
_place: list[int] = []
"""Where that room is in memory, once it was found: what sets variables later has them elsewhere."""
_FOLDER: Final = "fsdpcheck-"
_PROC: Final = Path("/proc")
_HAS_PROC: Final = (_PROC / "self" / "stat").exists()
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
_KEEPERS: Final = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""In the command lines of processes that outlive those they serve by a moment, to unlink what these have shared."""
_ROUNDS: Final = 100
"""Looks for processes that were forked while others were being ended; each look but the last ends some."""
_OF_A_SESSION: Final = re.compile(rf"{_FOLDER}([1-9]\d*)\.\d{{6,}}(?:\.\d+)?-[a-z0-9_]{{8}}")
"""What a temporary folder of a session is called, by its mark: pid, nanoseconds of a clock; nothing else is like it."""
_ABANDONED_S: Final = 7 * 24 * 3600
"""How long nobody must have written to a temporary folder before it is taken for abandoned."""
_PATIENCE_MS: Final = 2000
"""How long a process that was killed, or a keeper that nobody needs any more, may take to be gone."""


class Entry(NamedTuple):
    """One living process of /proc."""

    pid: int
    parent: int
    group: int
    session: int


def folder_prefix() -> str:
    """How the names of temporary folders begin that belong to this process's session."""
    return f"{_FOLDER}{os.environ.get(MARK, os.getpid())}-"


def living() -> Iterator[Entry]:
    """Every process that is no zombie; nothing where there is no /proc."""
    for stat in _PROC.glob("[0-9]*/stat") if _HAS_PROC else ():
        with suppress(OSError):
            state, *numbers = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield Entry(int(stat.parent.name), *map(int, numbers))


def is_living(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie; True where there is no /proc."""
    if not _HAS_PROC:
        return True
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children() -> frozenset[int]:
    """The living children of this process."""
    me = os.getpid()
    return frozenset(entry.pid for entry in living() if entry.parent == me)


def clear(leader: int, mark: str, known: frozenset[int] | None = None) -> int:
    """End what is left of the session of ``leader``, which is not reaped yet, and remove its temporary folders.

    ``known``: children of this process that are not to be touched; those beside them are orphans of the session. None:
    orphans are not looked for. Returns how many processes were ended. ``leader`` itself is killed and not reaped.
    """
    me, sought = os.getpid(), f"{MARK}={mark}\0".encode()

    def belongs(entry: Entry) -> bool:
        orphaned = known is not None and entry.parent == me and entry.pid not in known
        return entry.session == leader or orphaned or sought in environment(entry.pid)

    if leader != me:
        _kill(leader)
    ended = _end(lambda entry: entry.pid not in (me, leader) and belongs(entry))
    _remove_folders(mark)
    return ended


def _remove_folders(mark: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}{mark}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the temporary folders of sessions that were killed, and nothing was left to remove them.

    Those with the name of a session's, of this user, whose process is not there and that were not written to for
    ``_ABANDONED_S``: it might be another's, who sees the folders of this machine and not its processes.
    """
    youngest = time.time() - _ABANDONED_S
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}[0-9]*"):
        owner = _OF_A_SESSION.fullmatch(folder.name)
        with suppress(OSError):
            if owner and not is_living(int(owner[1])) and _is_own(folder) and _written(folder) < youngest:
                shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, and not a link to one, of the user that this process runs as."""
    found = folder.lstat()
    return S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _written(folder: Path) -> float:
    """When the folder, or a file in it, was last written to."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def end_group(leader: int) -> int:
    """End all but ``leader`` of its process group; returns how many. ``leader`` is not reaped yet."""
    if not _HAS_PROC:
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
        return 0
    session = os.getsid(0)
    return _end(lambda entry: entry.group == leader != entry.pid and entry.session == session)


def end_marked(mark: str) -> int:
    """End all that began with the mark in its environment, in sessions of its own too; returns how many.

    And remove its temporary folders. This process is left alone.
    """
    me, sought = os.getpid(), f"{MARK}={mark}\0".encode()
    ended = _end(lambda entry: entry.pid != me and sought in environment(entry.pid))
    _remove_folders(mark)
    return ended


def mark(mark: str) -> None:
    """Have others read ``mark`` in the environment that this process began with, and so in that of what it forks.

    What a process sets later is not told there, so it is written over ROOM, where the process was started with that.
    """
    if not _place:
        find = ctypes.CDLL(None).getenv
        find.restype = ctypes.c_void_p
        place = find(MARK.encode())
        if not place or ctypes.string_at(place, len(ROOM)) != ROOM.encode():
            return
        _place.append(place)
    ctypes.memmove(_place[0], mark.encode().ljust(len(ROOM), b"\0"), len(ROOM))


@contextmanager
def adopting() -> Iterator[None]:
    """Within it, orphans among the descendants of this process become its children, where the system offers that."""
    before = _adopts()
    offered = before is not None and ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1) == 0
    try:
        yield
    finally:
        if offered and not before:
            ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0)


def can_adopt() -> bool:
    """Whether the system offers that."""
    return _adopts() is not None


def _adopts() -> bool | None:
    """Whether orphans come to this process now; None where the system offers no such thing."""
    found = ctypes.c_int(0)
    try:
        return bool(found.value) if ctypes.CDLL(None).prctl(_GET_CHILD_SUBREAPER, ctypes.byref(found)) == 0 else None
    except (AttributeError, OSError):
        return None


def _end(wanted: Callable[[Entry], bool]) -> int:
    """End all living processes that are wanted, and those that they fork meanwhile; keepers last."""
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        found = {entry.pid for entry in living() if wanted(entry)}
        if not found:
            break
        keepers = {pid for pid in found if _is_keeper(pid)}
        if found == keepers:
            for pid in keepers:
                _await(pid)
        last = (found - keepers) or keepers
        for pid in last:
            _kill(pid)
        for pid in last:
            _await(pid)
        ended |= found - keepers
    return len(ended)


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _await(pid: int) -> None:
    """Return when the process has ended, or after a moment; reap it if it has become a child of this one."""
    with suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(_PATIENCE_MS)
        finally:
            os.close(descriptor)
    with suppress(OSError):
        os.waitpid(pid, os.WNOHANG)


def environment(pid: int) -> bytes:
    """What the process had in its environment when it began, or was forked from had; empty where that is not told."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # of another user, or gone
        return b""


def _is_keeper(pid: int) -> bool:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _KEEPERS)
