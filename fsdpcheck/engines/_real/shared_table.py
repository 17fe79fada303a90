"""A table in shared memory where real ranks publish what they do, and which proves that nobody can move.

Each rank owns one row: a header, and a log of the collectives it has issued. A call is appended to the log *before* it
is performed, and a rank is marked blocked only while it waits for one. Rows are guarded by a sequence lock: the counter
is odd during a change and never goes back, so two equal readings of all rows, back to back, are the state of all ranks
at one instant. No clock decides anything.
"""

from __future__ import annotations

import mmap
import pickle
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution.trace import Collective, Trace

ROW = 1 << 26
"""Bytes of a row; the file is sparse, so what is not written costs nothing."""

_COUNTER = struct.Struct("=Q")
_FIELDS = struct.Struct("=QQQq")
_LENGTH = struct.Struct("=I")
_LOG = 64
_NOT_BLOCKED = -1


@dataclass(frozen=True, slots=True)
class Header:
    """One reading of a row.

    ``run``: the number of the run the log belongs to. ``blocked_in``: index into the log, None when not blocked.
    ``moved``: time.monotonic_ns of the last change, the same clock in all processes; for reports only.
    """

    counter: int
    run: int
    calls: int
    moved: int
    blocked_in: int | None

    @property
    def stable(self) -> bool:
        return self.counter % 2 == 0


def create(path: Path, world_size: int) -> None:
    """Make the file of a table with one row a rank."""
    with path.open("wb") as file:
        file.truncate(ROW * world_size)


class Row:
    """The writing side: one rank's row. Safe to use from several threads of the rank."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ROW, offset=ROW * rank)
        self._lock = threading.Lock()
        self._counter = self._run = self._bytes = self._calls = 0
        self._blocked: list[int] = []

    def begin(self, run: int) -> None:
        """Start the log of run number ``run``, forgetting the previous one."""
        with self._change():
            self._run, self._bytes, self._calls = run, 0, 0
            self._blocked = []

    def end(self) -> None:
        """Note that the rank came to the end of its program, however it ended."""
        with self._change():
            self._blocked = []

    def issue(self, collective: Collective) -> int:
        """Append a call that is about to be performed; returns its index. Raises FsdpcheckError when full."""
        record = pickle.dumps(collective, pickle.HIGHEST_PROTOCOL)
        with self._change():
            start = _LOG + self._bytes
            end = start + _LENGTH.size + len(record)
            if end > ROW:
                raise FsdpcheckError(f"one run may issue {ROW} bytes of collectives; the row is full at {self._calls}")
            self._memory[start:end] = _LENGTH.pack(len(record)) + record
            self._bytes, self._calls = end - _LOG, self._calls + 1
            return self._calls - 1

    @contextmanager
    def blocked(self, index: int) -> Iterator[None]:
        """While open, the rank waits for call ``index`` and does nothing else."""
        with self._change():
            self._blocked.append(index)
        try:
            yield
        finally:
            with self._change():
                self._blocked.remove(index)

    def close(self) -> None:
        self._memory.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            self._advance()
            try:
                yield
            finally:
                self._advance()

    def _advance(self) -> None:
        """Odd: the fields may be half written. Even: they belong together."""
        self._counter += 1
        if self._counter % 2:
            _COUNTER.pack_into(self._memory, 0, self._counter)
            return
        blocked = self._blocked[-1] if self._blocked else _NOT_BLOCKED
        _FIELDS.pack_into(self._memory, 8, self._run, self._calls, time.monotonic_ns(), blocked)
        _COUNTER.pack_into(self._memory, 0, self._counter)


class Table:
    """The reading side: all rows."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._size = world_size
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ROW * world_size, access=mmap.ACCESS_READ)
        self._logs = [_Log(rank) for rank in range(world_size)]

    def read(self) -> tuple[Header, ...]:
        """One reading of every header, in rank order; of one instant only if a second is equal and all are stable."""
        return tuple(self._header(rank) for rank in range(self._size))

    def snapshot(self) -> tuple[Header, ...] | None:
        """The headers of all ranks at one instant; None when some rank was changing its row."""
        first = self.read()
        return first if all(header.stable for header in first) and self.read() == first else None

    def trace(self, rank: int, header: Header) -> Trace:
        """The calls that the rank had issued in run ``header.run`` when ``header`` was read."""
        return self._logs[rank].read(self._memory, header)

    def close(self) -> None:
        self._memory.close()

    def _header(self, rank: int) -> Header:
        (counter,) = _COUNTER.unpack_from(self._memory, ROW * rank)
        run, calls, moved, blocked = _FIELDS.unpack_from(self._memory, ROW * rank + 8)
        return Header(counter, run, calls, moved, None if blocked == _NOT_BLOCKED else blocked)


class _Log:
    """Decodes one rank's log as it grows."""

    def __init__(self, rank: int) -> None:
        self._start = ROW * rank + _LOG
        self._run, self._place, self._calls = 0, self._start, list[Collective]()

    def read(self, memory: mmap.mmap, header: Header) -> Trace:
        if header.run != self._run:
            self._run, self._place, self._calls = header.run, self._start, []
        while len(self._calls) < header.calls:
            (length,) = _LENGTH.unpack_from(memory, self._place)
            end = self._place + _LENGTH.size + length
            self._calls.append(pickle.loads(memory[self._place + _LENGTH.size : end]))
            self._place = end
        return tuple(self._calls[: header.calls])
