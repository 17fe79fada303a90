"""Processes that are forked for ranks: they tell what becomes of each, and are ended together, as torchrun does."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch

from fsdpcheck.engines._real import stacks
from fsdpcheck.engines._real.follower import STACK_SIGNAL
from fsdpcheck.processes import fork_server, leftovers

GRACE_SECONDS: Final = 2.0
"""How long the other ranks may go on when one has failed, before they are ended."""

_LOOK_SECONDS: Final = 0.005
"""How often somebody is asked whether ranks can move; no verdict depends on it."""
_FORK: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Said:
    """What became of a rank: a kind, and more of it. ``fails``: torchrun would end the other ranks for it.

    ``moment``: when it was said, by one clock of all processes; it tells causes from consequences, and nothing else.
    """

    kind: str
    what: Any = None
    fails: bool = False
    moment: int = field(default_factory=time.monotonic_ns, compare=False)


Say = Callable[[int, Said], None]
"""Tells the parent what became of a rank."""


class Forked:
    """A process for the ranks of each program; leaving ends them all, with what they have forked.

    ``said``: by rank. A program that ends has said what became of all its ranks; of a
    process that ends otherwise its code is said in its stead, as "ended".
    """

    def __init__(self, programs: Mapping[tuple[int, ...], Callable[[Say], None]]) -> None:
        self.said: dict[int, Said] = {}
        self._folder = Path(tempfile.mkdtemp(prefix=leftovers.folder_prefix()))
        self._processes: dict[Connection, tuple[tuple[int, ...], BaseProcess]] = {}
        self._open: set[Connection] = set()
        try:
            for ranks, program in programs.items():
                self._fork(ranks, program)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for _, process in self._processes.values():
            process.kill()
            leftovers.end_group(int(process.pid or 0))
            process.join()
        for pipe in self._processes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def silent(self) -> list[int]:
        """The ranks of which nothing has been said."""
        return sorted(rank for ranks, _ in self._processes.values() for rank in ranks if rank not in self.said)

    def output(self, rank: int) -> str:
        """What the process of the rank has written to stdout and stderr so far."""
        ranks, _ = self._of(rank)
        return _output(self._folder, ranks[0]).read_text(errors="replace")

    def stacks(self, ranks: Iterable[int]) -> dict[int, stacks.Stack]:
        """Where the processes of these ranks stand; of a process that has ended, nothing."""
        processes = {rank: self._of(rank) for rank in ranks}
        files = {rank: _stack(self._folder, own[0]) for rank, (own, _) in processes.items()}
        pids = {rank: int(process.pid or 0) for rank, (_, process) in processes.items()}
        return stacks.collect(files, pids, lambda rank: processes[rank][1].is_alive())

    def until_over(
        self,
        seconds: float | None = None,
        grace_seconds: float = GRACE_SECONDS,
        look: Callable[[], bool] | None = None,
    ) -> None:
        """Return when all have ended, ``grace_seconds`` after the first has failed, or after ``seconds``.

        ``look``: asked again and again while ranks run; it says that no rank can move.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._open and self.silent:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for pipe in wait(list(self._open), left if look is None else min(_LOOK_SECONDS, left or _LOOK_SECONDS)):
                assert isinstance(pipe, Connection)
                self._hear(pipe)
            if look is not None and look():
                return
            if any(said.fails for said in self.said.values()):
                soon = time.monotonic() + grace_seconds
                deadline = soon if deadline is None else min(deadline, soon)

    def _of(self, rank: int) -> tuple[tuple[int, ...], BaseProcess]:
        (found,) = (both for both in self._processes.values() if rank in both[0])
        return found

    def _hear(self, pipe: Connection) -> None:
        ranks, process = self._processes[pipe]
        try:
            rank, said = pipe.recv()
            self.said[rank] = said
        except (EOFError, ConnectionError):
            self._open.discard(pipe)
            process.join()
            code = process.exitcode or 0
            self.said |= {rank: Said("gone", code, code != 0) for rank in ranks if rank not in self.said}

    def _fork(self, ranks: tuple[int, ...], program: Callable[[Say], None]) -> None:
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_live, args=(program, theirs, self._folder, ranks[0]))
        with warnings.catch_warnings():  # of threads, which a session of tests may have, and no child of it uses
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._processes[ours] = ranks, process
        self._open.add(ours)


def _output(folder: Path, first: int) -> Path:
    return folder / f"output.{first}"


def _stack(folder: Path, first: int) -> Path:
    return folder / f"stack.{first}"


def _live(program: Callable[[Say], None], pipe: Connection, folder: Path, first: int) -> None:
    """The whole life of a process: the parent's handlers and streams are none of its own."""
    os.setpgid(0, 0)  # what a rank forks is in its group, and ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.register_at_fork(after_in_child=pipe.close)  # whoever holds it has not ended
    fork_server.follow_parent_into_death(folder)
    with _stack(folder, first).open("w") as stack_file:
        faulthandler.register(STACK_SIGNAL, stack_file, all_threads=False)
        _print_to(_output(folder, first))
        torch.set_num_threads(1)
        program(lambda rank, said: pipe.send((rank, said)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _print_to(file: Path) -> None:
    """Have all that this process prints, in C too, go to the file; and give it nothing to read."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="replace")
