"""Recorded process groups that perform their calls on real gloo, and publish every wait to a table."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from fsdpcheck.compat import dtensor_private, groups_private
from fsdpcheck.engines._real.shared_table import Row
from fsdpcheck.execution.call_sites import subject_and_line
from fsdpcheck.execution.matching import MAKING
from fsdpcheck.execution.recording import Call, RecordingGroup
from fsdpcheck.execution.trace import Collective

_NEVER = timedelta(days=30)
"""gloo's own time-out, out of the way: a hang is proved from the table, long before."""


def native_group(
    store: c10d.Store, rank: int, size: int, address: str, timeout: timedelta = _NEVER
) -> c10d.ProcessGroupGloo:
    """A real gloo group whose other members find this one at ``address``. Blocks until all members have come."""
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    options._threads = 2
    return c10d.ProcessGroupGloo(store, rank, size, options)


class GlooGroup(RecordingGroup):
    """Publishes a call, then has gloo perform it."""

    def __init__(self, rank: int, size: int, native: c10d.ProcessGroupGloo, row: Row) -> None:
        super().__init__(rank, size)
        self._native, self._row = native, row

    def _perform(self, call: Call) -> GlooWork:
        index = self._row.issue(call.collective)
        try:
            work: GlooWork = call.native(_Waits(self._native, self._row, index))
        except BaseException:
            self._row.withdraw(index)
            raise
        work.outputs = call.outputs
        return work


class _Waits:
    """gloo, with works that publish when they are waited for."""

    def __init__(self, native: c10d.ProcessGroupGloo, row: Row, index: int) -> None:
        self._native, self._row, self._index = native, row, index

    def barrier(self, opts: Any) -> GlooWork:
        native: Any = self._native
        return self._work(native.barrier(opts if opts is not None else c10d.BarrierOptions()))

    def __getattr__(self, method: str) -> Callable[..., GlooWork]:
        native = getattr(self._native, method)
        return lambda *arguments: self._work(native(*arguments))

    def _work(self, native: Any) -> GlooWork:
        return GlooWork(native, self._row, self._index)


class GlooWork(c10d.Work):
    """A gloo call under way. Futures wait for the call first: what C++ waits for could not be published."""

    def __init__(self, native: Any, row: Row, index: int) -> None:
        super().__init__()
        self._native, self._row, self._index = native, row, index
        self._done = False
        self.outputs: list[Tensor] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Whoever waits so long and no longer can move, so that is not published."""
        if not self._done and timeout:
            self._native.wait(timeout)
        elif not self._done:
            with self._row.blocked(self._index):
                self._native.wait()
        self._done = True
        return True

    def _source_rank(self) -> int:
        self.wait()
        return int(self._native._source_rank())

    def is_completed(self) -> bool:
        return bool(self._native.is_completed())

    def is_success(self) -> bool:
        return bool(self._native.is_success())

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.outputs)
        return future

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs


class Publishing:
    """Groups over gloo that this process makes, each of which publishes to one row what this rank waits for."""

    def __init__(self, row: Row, address: str = "127.0.0.1", backend: str = groups_private.OVER_GLOO) -> None:
        self._row, self._address = row, address
        self._made: Counter[str] = Counter()
        self._pending: list[Callable[[], int]] = []
        _register(self._create, backend)

    @contextmanager
    def making(self, name: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """While open, this rank makes a group, which is issued when it begins to wait for the other members."""
        _, where = subject_and_line(sys._getframe(2))
        made = Collective(MAKING, ranks, f"{MAKING} {name}", self._made[name], where=where)
        self._made[name] += 1
        self._pending.append(functools.cache(lambda: self._row.issue(made)))
        try:
            yield
        finally:
            self._pending.pop()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While open, gloo waits for the other members of the group that is made."""
        if not self._pending:
            yield
            return
        with self._row.blocked(self._pending[-1]()):
            yield

    def _create(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> GlooGroup:
        with self._waiting():
            native = native_group(store, rank, size, self._address, timeout)
        return GlooGroup(rank, size, native, self._row)


class World(Publishing):
    """What one process needs to be ``rank`` of ``size`` again and again: a store, a row, and a gloo group of all.

    Every ``open`` makes torch.distributed's world new (names, counters), on the gloo connections that already exist.
    """

    def __init__(self, rank: int, size: int, store: c10d.Store, row: Row, address: str = "127.0.0.1") -> None:
        super().__init__(row, address, groups_private.BACKEND)
        self.rank, self.size = rank, size
        self._store = store
        self._native = native_group(c10d.PrefixStore("world", store), rank, size, address)
        self._is_open = False
        groups_private.announce_groups(self.making)

    def open(self, run: int) -> None:
        """Initialise the default group of run number ``run``; groups the program makes get connections of their own."""
        self._row.begin(run)
        self._made.clear()
        store = c10d.PrefixStore(f"run {run}", self._store)
        dist.init_process_group(groups_private.BACKEND, rank=self.rank, world_size=self.size, store=store)

    def close(self) -> None:
        """End the run's groups."""
        self._row.end()
        self._is_open = False
        if dist.is_initialized():
            several = len(groups_private.groups_of_this_thread()) > 1
            dist.destroy_process_group()
            if several:
                dtensor_private.forget_meshes()

    def _create(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> GlooGroup:
        if self._is_open:
            return super()._create(store, rank, size, _NEVER)
        self._is_open = True
        return GlooGroup(rank, size, self._native, self._row)


_create: dict[str, Callable[..., GlooGroup]] = {}


def _register(create: Callable[..., GlooGroup], backend: str) -> None:
    """torch.distributed keeps a backend's creator for the life of the process, so it looks up the newest one."""
    if backend not in _create:
        dist.Backend.register_backend(
            backend, lambda *arguments: _create[backend](*arguments), devices=groups_private.devices()
        )
    _create[backend] = create
