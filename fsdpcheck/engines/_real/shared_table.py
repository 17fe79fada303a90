"""A table in shared memory where real ranks publish what they do, and which proves that nobody can move.

Each rank owns one row: a header, and a log of the collectives it has issued. A call is appended to the log *before* it
is performed, and a rank is marked blocked only while each of its threads waits for one. Rows are guarded by a sequence
lock: the counter is odd during a change and never goes back, so two equal readings of a row, back to back, are a state
that the rank had. No clock decides anything.

That nobody can move needs no common instant. Say that each rank was seen blocked in a call that some member had not
issued when that member was seen. The first rank to go on would need that member to have issued the call since, so the
member would have gone on before the first. So rows may be read one after another, or come late from another node.
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
_FIELDS = struct.Struct("=QQQQQ")
_BLOCKED = struct.Struct("=Q")
_LENGTH = struct.Struct("=I")
_LOG = 256
_WITHDRAWN = "withdrawn"
_MOST_BLOCKED = 24
"""Threads of one rank whose calls are published; with more of them the rank is never seen blocked."""


@dataclass(frozen=True, slots=True)
class Header:
    """One reading of a row.

    ``run``: the number of the run the log belongs to. ``blocked``: the calls, as indices into the log, that the threads
    of the rank wait for, that of the program first; () while one of them waits for none. ``moved``: time.monotonic_ns
    of the last change, the same clock in all processes of a node; for reports only. ``elsewhere``: how many of the
    calls other threads than the program's have issued.
    """

    counter: int
    run: int
    calls: int
    moved: int
    blocked: tuple[int, ...]
    elsewhere: int = 0

    @property
    def blocked_in(self) -> int | None:
        """The call that the program waits for; None when the rank is not blocked."""
        return self.blocked[0] if self.blocked else None

    @property
    def stable(self) -> bool:
        return self.counter % 2 == 0


def create(path: Path, world_size: int) -> None:
    """Make the file of a table with one row a rank."""
    with path.open("wb") as file:
        file.truncate(ROW * world_size)


class Row:
    """The writing side: one rank's row. Safe to use from several threads of the rank.

    A thread that was started during a run, and lives, may do what lets others go on; so it has to be blocked as well.
    """

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ROW, offset=ROW * rank)
        self._lock = threading.Lock()
        self._counter = self._run = self._bytes = self._calls = self._elsewhere = 0
        self._blocked: list[tuple[int, int]] = []
        self._program, self._others = threading.get_ident(), frozenset[threading.Thread]()

    def begin(self, run: int) -> None:
        """Start the log of run number ``run``, forgetting the previous one. This thread is the program's."""
        with self._change():
            self._program, self._others = threading.get_ident(), frozenset(threading.enumerate())
            self._run, self._bytes, self._calls, self._elsewhere = run, 0, 0, 0
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
            self._elsewhere += threading.get_ident() != self._program
            return self._calls - 1

    def withdraw(self, index: int) -> None:
        """Say that call ``index`` was refused before it was performed: nobody meets this rank in it."""
        self.issue(Collective(_WITHDRAWN, (), "", index))

    @contextmanager
    def blocked(self, index: int) -> Iterator[None]:
        """While open, this thread of the rank waits for call ``index`` and does nothing else."""
        waiting = threading.get_ident(), index
        with self._change():
            self._blocked.append(waiting)
        try:
            yield
        finally:
            with self._change():
                self._blocked.remove(waiting)

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
        blocked = self._all_blocked()
        fields = self._run, self._calls, self._elsewhere, time.monotonic_ns(), len(blocked)
        _FIELDS.pack_into(self._memory, 8, *fields)
        for place, index in enumerate(blocked):
            _BLOCKED.pack_into(self._memory, 8 + _FIELDS.size + place * _BLOCKED.size, index)
        _COUNTER.pack_into(self._memory, 0, self._counter)

    def _all_blocked(self) -> list[int]:
        """The call that each thread waits for, the program's first; none if a thread does not wait."""
        waits = dict(self._blocked)  # of a thread, the call that it came to last
        if self._program not in waits:
            return []
        started = (thread for thread in threading.enumerate() if thread not in self._others)
        if any(thread.ident not in waits for thread in started) or len(waits) > _MOST_BLOCKED:
            return []
        return [waits.pop(self._program), *waits.values()]


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
        start = ROW * rank + 8
        run, calls, elsewhere, moved, count = _FIELDS.unpack_from(self._memory, start)
        places = range(start + _FIELDS.size, start + _FIELDS.size + min(count, _MOST_BLOCKED) * _BLOCKED.size, 8)
        blocked = tuple(_BLOCKED.unpack_from(self._memory, place)[0] for place in places)
        return Header(counter, run, calls, moved, blocked, elsewhere)


def performed(trace: Trace) -> Trace:
    """The calls of a log without those that were withdrawn, and without the entries that say so."""
    refused = {call.sequence for call in trace if call.op == _WITHDRAWN}
    return tuple(call for place, call in enumerate(trace) if place not in refused and call.op != _WITHDRAWN)


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
