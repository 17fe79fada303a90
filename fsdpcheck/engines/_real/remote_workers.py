"""Links to workers that other processes of torchrun keep, on this node or on another, and the rows of far ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fsdpcheck.engines._real import post, shared_table
from fsdpcheck.engines._real.shared_table import Header
from fsdpcheck.engines._real.stacks import Stack
from fsdpcheck.execution.trace import Collective, Trace
from fsdpcheck.processes.limit import processor_seconds, sleep_of

_PATIENCE_SECONDS: Final = 5.0
"""How long evidence, and the end of a worker that was killed, are waited for. It makes no verdict."""
_LOOK_SECONDS: Final = 0.002
_NO_ROW: Final = Header(0, 0, 0, 0, ())


class KeptLink:
    """The driver's side of a worker on this node. A far one's keeper tells what is read off the system elsewhere.

    ``why_gone()``: why its keeper is not there any more, "" while it is.
    """

    is_near = True

    def __init__(self, office: post.Office, rank: int, start: post.Start, why_gone: Callable[[], str]) -> None:
        self._office, self._rank, self._pool, self._why_gone = office, rank, start.pool, why_gone
        self._replies: list[bytes] = []
        self._ended: post.Ended | None = None
        self._pid, self._stack = 0, Stack()
        self.sees = True
        office.send(rank, start)

    @property
    def pid(self) -> int:
        """Of the worker; 0 while it has not been started."""
        self._hear()
        return self._pid

    def send(self, payload: bytes) -> None:
        self._office.send(self._rank, post.Request(self._pool, payload))

    def receive(self) -> bytes | None:
        self._hear()
        return self._replies.pop(0) if self._replies else None

    def exit_code(self) -> int | None:
        """A worker ends with its keeper."""
        self._hear()
        if self._ended is None and (why := self._why_gone()):
            self._ended = post.Ended(self._pool, -signal.SIGKILL, why)
        return None if self._ended is None else self._ended.code

    def last_words(self, written: Path) -> str | None:
        """What the worker wrote last, as its keeper tells; None to read it off the file."""
        return (self._ended.words if self._ended else "") or None

    def sources(self) -> list[Any]:
        return []

    def processor_seconds(self) -> float:
        return processor_seconds(self.pid)

    def sleep(self) -> str:
        return sleep_of(f"/proc/{self.pid}/task/{self.pid}")

    def end(self) -> None:
        """Have the worker killed, and wait until its keeper has reaped it."""
        with suppress(post.StoreIsGone):  # then its keeper ends, and it with that
            self._end()

    def _end(self) -> None:
        if self.exit_code() is not None:
            return
        self._office.send(self._rank, post.End(self._pool))
        if self.is_near and self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._wait_for(lambda: self.exit_code() is not None)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not done() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def _hear(self) -> None:
        waiting = self._office.look(self._rank, self._pool)
        while waiting:
            self._take(waiting.popleft())

    def _take(self, message: post.FromKeeper) -> None:
        match message:
            case post.Started():
                self._pid, self.sees = message.pid, message.sees
            case post.Reply():
                self._replies.append(message.payload)
            case post.Ended():
                self._ended = message
            case post.Standing():
                self._stack = message.stack


class FarLink(KeptLink):
    """The driver's side of a worker on another node."""

    is_near = False

    def __init__(self, office: post.Office, rank: int, start: post.Start, why_gone: Callable[[], str]) -> None:
        self._header, self._calls = _NO_ROW, list[Collective]()
        self._used, self._sleep = 0.0, "awake"
        super().__init__(office, rank, start, why_gone)

    def processor_seconds(self) -> float:
        return self._used

    def sleep(self) -> str:
        return self._sleep

    def stack(self) -> Stack:
        """Where the worker stands; nothing where its keeper is silent."""
        self._stack = Stack()
        self._office.send(self._rank, post.AskStack(self._pool))
        self._wait_for(self._has_stack)
        return self._stack

    def _has_stack(self) -> bool:
        self._hear()
        return bool(self._stack.lines or self._ended)

    def header(self) -> Header:
        """The worker's row as it was told last."""
        self._hear()
        return self._header

    def trace(self, header: Header) -> Trace:
        """Its calls at ``header``."""
        return tuple(self._calls[: header.calls])

    def _take(self, message: post.FromKeeper) -> None:
        super()._take(message)
        match message:
            case post.Moved(_, header, calls):
                if header.run != self._header.run:
                    self._calls = []
                self._calls += calls
                self._header = replace(header, moved=time.monotonic_ns())  # clocks of nodes have nothing in common
            case post.Life():
                self._used, self._sleep = message.processor_seconds, message.sleep


class RowsOfNodes(shared_table.Table):
    """The table of a pool over several nodes: far rows as their keepers tell them, which may be late.

    See shared_table: that nobody can move is true of rows of any times.
    """

    far: dict[int, FarLink]

    def __init__(self, path: Path, world_size: int) -> None:
        super().__init__(path, world_size)
        self.far = {}

    def trace(self, rank: int, header: Header) -> Trace:
        return self.far[rank].trace(header) if rank in self.far else super().trace(rank, header)

    def _header(self, rank: int) -> Header:
        return self.far[rank].header() if rank in self.far else super()._header(rank)
