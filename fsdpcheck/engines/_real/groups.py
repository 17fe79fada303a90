"""Recorded process groups that perform their calls on real gloo or NCCL, and publish every wait to a table."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from fsdpcheck.compat import dtensor_private, groups_private
from fsdpcheck.engines._real import backends
from fsdpcheck.engines._real.backends import Connect, Native
from fsdpcheck.engines._real.shared_table import Row
from fsdpcheck.execution.call_sites import subject_and_line
from fsdpcheck.execution.matching import MAKING
from fsdpcheck.execution.recording import Call, RecordingGroup, Together
from fsdpcheck.execution.trace import Collective


class RealGroup(RecordingGroup):
    """Publishes a call, then has the backend perform it."""

    def __init__(self, rank: int, size: int, native: Native, row: Row) -> None:
        super().__init__(rank, size)
        self._native, self._row = native, row

    def _perform(self, call: Call) -> RealWork:
        index = self._row.issue(call.collective)
        try:
            with self._row.blocked(index) if self._native.connects(call.collective) else nullcontext():
                work: RealWork = call.native(_Waits(self._native, self._row, index))
        except BaseException:
            self._row.withdraw(index)
            raise
        work.outputs = call.outputs
        return work

    @property
    def _device_types(self) -> list[torch.device]:
        """Asked for by torch.distributed.checkpoint, of a group's backends."""
        return [torch.device(self._native.device.type)]

    def _is_like_nccl(self) -> bool:
        return self._native.is_nccl

    def _start_coalescing(self, *args: Any) -> None:
        super()._start_coalescing(*args)
        self._native.begin_together()

    def _end_coalescing(self, *args: Any) -> Together:
        """One work for all calls since the start, which the backend performs as one."""
        work, together = self._native.end_together(), super()._end_coalescing(*args)
        for each in together.works:
            each.is_part_of(work)
        return together


class _Waits:
    """The backend, with works that publish when they are waited for."""

    def __init__(self, native: Native, row: Row, index: int) -> None:
        self._native, self._row, self._index = native, row, index

    def barrier(self, opts: Any) -> RealWork:
        return self._work(self._native.barrier(opts))

    def __getattr__(self, method: str) -> Callable[..., RealWork]:
        native = getattr(self._native.group, method)
        return lambda *arguments: self._work(native(*arguments))

    def _work(self, work: Any) -> RealWork:
        return RealWork(work, self._native, self._row, self._index)


class RealWork(c10d.Work):
    """A call under way. Futures wait for the call first: what C++ waits for could not be published.

    After ``wait`` the call is over on the GPU too: work that is only queued there can wait for others without end, and
    then nobody could say where.
    """

    def __init__(self, work: Any, native: Native, row: Row, index: int) -> None:
        super().__init__()
        self._work, self._native, self._row, self._index = work, native, row, index
        self._done = False
        self.outputs: list[Tensor] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Whoever waits so long and no longer can move, so that is not published."""
        if not self._done and timeout:
            self._work.wait(timeout)
        elif not self._done:
            with self._row.blocked(self._index):
                self._work.wait()
                self._native.settle()
        self._done = True
        return True

    def is_part_of(self, whole: Any) -> None:
        """The backend has performed this call with others, as one."""
        self._work = whole

    def _source_rank(self) -> int:
        self.wait()
        return int(self._work._source_rank())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

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
    """Groups that this process makes, each of which publishes to one row what this rank waits for.

    ``connect``: how one is made on the backend; over gloo by default.
    """

    def __init__(
        self, row: Row, connect: Connect = backends.over_gloo, backend: str = groups_private.OVER_GLOO
    ) -> None:
        self._row, self._connect = row, connect
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
        """While open, the backend waits for the other members of the group that is made."""
        if not self._pending:
            yield
            return
        with self._row.blocked(self._pending[-1]()):
            yield

    def _create(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> RealGroup:
        with self._waiting():
            native = self._connect(store, rank, size, timeout)
        return RealGroup(rank, size, native, self._row)


class World(Publishing):
    """What one process needs to be ``rank`` of ``size`` again and again: a store, a row, and a native group of all.

    Every ``open`` makes torch.distributed's world new (names, counters), on the connections that already exist.
    """

    def __init__(
        self, rank: int, size: int, store: c10d.Store, row: Row, connect: Connect = backends.over_gloo
    ) -> None:
        super().__init__(row, connect, groups_private.BACKEND)
        self.rank, self.size = rank, size
        self._store = store
        self._native = connect(c10d.PrefixStore("world", store), rank, size, backends.NEVER)
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

    def _create(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> RealGroup:
        if self._is_open:
            return super()._create(store, rank, size, backends.NEVER)
        self._is_open = True
        return RealGroup(rank, size, self._native, self._row)


_create: dict[str, Callable[..., RealGroup]] = {}


def _register(create: Callable[..., RealGroup], backend: str) -> None:
    """torch.distributed keeps a backend's creator for the life of the process, so it looks up the newest one."""
    if backend not in _create:
        dist.Backend.register_backend(
            backend, lambda *arguments: _create[backend](*arguments), devices=groups_private.devices()
        )
    _create[backend] = create
