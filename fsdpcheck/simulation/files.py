"""Files that several ranks use: which of them comes first may depend on the schedule, and nobody need communicate.

Looked at are what Python opens, renames, removes and asks about by os.stat (so by ``exists``), and what torch.save
writes. Not: what C code opens by itself, what lies where Python, installed packages, the system or a cache keep theirs,
and locks. Folders, and what is appended to before a rank looks at it, are reported and not searched
(simulation/folders.py).

In a run that is decided, each use waits until it is decided that it comes next. In any other, two uses of one file by
two ranks, of which one writes and neither had to come before the other for all that the ranks told each other, are
noted, and void. A rank that imports, sets up logging or holds a lock, or a thread that it started, is not held up, but
noted too.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol

from fsdpcheck.compat import frames_private, torch_private
from fsdpcheck.compat.files_private import archives_written
from fsdpcheck.simulation.current_rank import here
from fsdpcheck.simulation.decisions import Access, Decisions
from fsdpcheck.simulation.folders import Folders, Kind, allows_that_it_exists
from fsdpcheck.simulation.named_locks import LOCKS, is_taken, named
from fsdpcheck.simulation.scheduler import Baton, where
from fsdpcheck.simulation.surroundings import EVENTS, pipes_of_ranks, said_of

_PYTHON: Final = {sys.prefix, sys.base_prefix, sys.exec_prefix}
_FOLDERS: Final = (*(folder + os.sep for folder in _PYTHON), "/proc/", "/sys/", "/dev/", "/usr/", "/etc/", "/lib")
_NOT_LOOKED_AT: Final = re.compile(
    r"-packages/|/\.cache/|/\.triton/|/__pycache__/|/torchinductor_|\.(py|pyc|pyi|so|lock)$"
)
_TOLD: Final = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.listdir", "os.scandir", *EVENTS} | {
    *("tempfile.mkdtemp", "tempfile.mkstemp", "shutil.rmtree")
}
"""Python's audit events that are looked at."""
_LOCKING: Final = {"<frozen importlib._bootstrap>", logging.__file__}
_WRITES: Final = os.O_WRONLY | os.O_RDWR
_NUMBERS: Final = re.compile(r"\d{4,}|[0-9a-f]{16,}")
"""What is no part of the name that a file has in every run: the time, a number of a process."""


class Run(Protocol):
    """What is needed of the run whose ranks use files."""

    baton: Baton
    voids: set[str]
    decisions: Decisions | None
    heard: Decisions | None


@dataclass(frozen=True, slots=True)
class _Use:
    """The last use of a file by a rank, of its kind. ``count``: of the steps of the run when it was done."""

    access: Access
    count: int


class Files:
    """The files that ranks of one run have used."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._uses: dict[str, dict[tuple[int, bool], _Use]] = {}
        self._temporary: dict[str, str] = {}
        self._folders, self._mixed, self._asked = Folders(), set[str](), set[str]()
        self.notes: dict[str, str] = {}
        """By file, what is said of two uses that nothing orders."""

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """While open, what ranks do to files is seen."""
        _add_hook()
        asked = os.stat

        def stat_ours(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if here.number is not None and not _here.inside and options.get("dir_fd") is None:
                with suppress(OSError, ValueError, TypeError):
                    if stat.S_ISDIR(asked(path).st_mode):
                        if not allows_that_it_exists(sys._getframe(1)):
                            self._seen(path, folder="look")
                        return asked(path, *args, **options)
                self._seen(path, writes=False)
            return asked(path, *args, **options)

        _live.append(self._event)
        try:
            with (
                torch_private.replaced(os, stat=stat_ours),
                archives_written(lambda path: self._seen(path, writes=True)),
                pipes_of_ranks(self._run.voids),
            ):
                yield
        finally:
            _live.remove(self._event)

    @property
    def left(self) -> Iterator[str]:
        """Names of the files that a rank wrote, a rank read, and that are still there."""
        for path, uses in self._uses.items():
            if len({writes for _, writes in uses}) == 2 and os.path.exists(path):
                yield self._named(path)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        """One of Python's audit events, on a thread of a rank."""
        if event == "open":
            path, _, flags = args
            if flags & os.O_APPEND and not self._is_asked_for(path):
                self._seen(path, folder="append")
            else:
                self._seen(path, writes=bool(flags & (_WRITES | os.O_APPEND)))
        elif event == "os.mkdir":
            self._seen(args[0], folder="make if absent" if allows_that_it_exists(sys._getframe(2)) else "make")
        elif event in ("os.listdir", "os.scandir"):
            self._seen(args[0] if args[0] is not None else ".", folder="list")
        elif event in EVENTS:
            self._run.voids |= {said} if (said := said_of(event)) else set()
        elif event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
            number = sum(name.startswith(f"rank {here.number}:") for name in self._temporary.values())
            self._temporary[os.path.abspath(args[0])] = f"rank {here.number}: temporary {number}"
        elif event == "os.rename" and args[2:] == (-1, -1):
            for path in args[:2]:
                self._seen(path, writes=True)
        elif event in ("os.remove", "os.truncate") and (len(args) < 2 or args[1] in (-1, 0)):
            self._seen(args[0], writes=True)
        elif event == "shutil.rmtree":
            inside = os.path.abspath(args[0]) + os.sep
            for path in [path for path in self._uses if path.startswith(inside)]:
                self._seen(path, writes=True)

    def _is_asked_for(self, path: Any) -> bool:
        """Whether a rank looks at the file, so that what is appended to it decides what that one finds."""
        decided = self._run.decisions is not None and isinstance(path, str | os.PathLike)
        return decided and os.path.abspath(os.fspath(path)) in self._asked

    def _seen(self, path: Any, *, writes: bool = False, folder: Kind | None = None) -> None:
        if here.number is None or _here.inside or self._run.baton.aborting or not isinstance(path, str | os.PathLike):
            return
        name = os.fspath(path)
        if not isinstance(name, str) or (name := os.path.abspath(name)).startswith(_FOLDERS):
            return
        if not _NOT_LOOKED_AT.search(name):
            _here.inside = True
            try:
                if folder is None:
                    self._use(name, writes)
                else:
                    self._use_folder(name, folder)
            finally:
                _here.inside = False

    def _use(self, path: str, writes: bool) -> None:
        rank, heard = here.number, self._run.heard
        assert rank is not None
        self._asked.add(path)
        if writes and heard is not None:
            self._enter(path, rank, heard)
        frame = sys._getframe(2)
        access = Access(rank, ("file", path), writes, where(frame))
        if self._run.decisions is not None and here.turn is not None and not _may_hold_a_lock(frame):
            what = f"{'write' if writes else 'read'} of {self._named(path)}"
            self._run.decisions.wait_for(rank, what, access, self._run.baton)
            self._uses.setdefault(path, {})[rank, writes] = _Use(access, self._run.decisions.known_to(rank)[rank])
        elif heard is not None:
            self._compare(path, access, heard)
        late = path in self._folders and heard is not None and self._folders.use(path, rank, "look", heard)
        if late or (path in self._mixed and not writes):
            self._run.voids.add(f"ranks appended to a file in an order that nothing fixes: {self._named(path)}")

    def _use_folder(self, path: str, kind: Kind) -> None:
        """Uses of what is not searched."""
        rank, heard = here.number, self._run.heard
        assert rank is not None
        if heard is None:
            return
        races = self._folders.use(path, rank, kind, heard)
        known, others = heard.known_to(rank), [use for (r, _), use in self._uses.get(path, {}).items() if r != rank]
        if kind == "append" and any(known.get(use.access.rank, 0) < use.count for use in others):
            self._run.voids.add(f"ranks appended to a file in an order that nothing fixes: {self._named(path)}")
        if races and kind == "append":
            self._mixed.add(path)
        elif races:
            self._run.voids.add(f"ranks used a folder in an order that nothing fixes: {self._named(path)}")
        if kind in ("make", "make if absent", "append") and not os.path.lexists(path):
            self._enter(path, rank, heard)

    def _enter(self, path: str, rank: int, heard: Decisions) -> None:
        """A rank makes or removes an entry of a folder."""
        folder = os.path.dirname(path)
        if self._folders.use(folder, rank, "enter", heard):
            self._run.voids.add(f"ranks used a folder in an order that nothing fixes: {self._named(folder)}")

    def _compare(self, path: str, access: Access, heard: Decisions) -> None:
        """Note a use, and whether it could have come before one of another rank on which it depends."""
        known, uses = heard.known_to(access.rank), self._uses.setdefault(path, {})
        for (rank, _), use in uses.items():
            if access.depends_on(use.access) and known.get(rank, 0) < use.count and path not in self.notes:
                told = ", ".join(
                    f"rank {a.rank} {'wrote' if a.writes else 'read'} it at {a.where or 'an unknown place'}"
                    for a in (use.access, access)
                )
                self.notes[path] = f"order: which came first depended on the schedule: {path}: {told}"
                self._run.voids.add(f"ranks used a file in an order that nothing fixes: {self._named(path)}")
        heard.note(access)
        uses[access.rank, access.writes] = _Use(access, len(heard.steps))

    def _named(self, path: str) -> str:
        """The file's name in every run."""
        if path in self._temporary:
            return self._temporary[path]
        return _NUMBERS.sub("*", os.path.basename(path))


class _Here(threading.local):
    inside = False
    """Whether this thread is inside its own report of a use."""


_here = _Here()
_live: list[Callable[[str, tuple[Any, ...]], None]] = []
"""Who is told of events now: the run that is under way, if there is one."""
_hooked: list[bool] = []


def _add_hook() -> None:
    """Once a process, for it cannot be taken away: a hook that does nothing where no ranks run."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _live or here.number is None or _here.inside:
        return
    if event in _TOLD:
        _live[-1](event, args)


def _may_hold_a_lock(frame: FrameType | None) -> bool:
    """Whether Python imports a module or sets up logging, or the program's code names a lock that is taken.

    Other ranks may wait for it."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _LOCKING:
            return True
        if frames_private.is_a_program(file) and any(isinstance(one, LOCKS) and is_taken(one) for one in named(frame)):
            return True
        frame = frame.f_back
    return False
