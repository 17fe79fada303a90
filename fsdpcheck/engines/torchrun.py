"""Real ranks under torchrun, thin form: one machine, gloo, as many ranks as torchrun started processes.

Rank 0 hosts the driver. Every torchrun process, rank 0 too, keeps one worker process that is the rank and that it
replaces after a failure; so a rank that hangs or dies takes neither torchrun nor the driver along. Orders and replies
travel through torchrun's own store.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch._C._distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from fsdpcheck.engines._common import hosts
from fsdpcheck.engines._real import monitor
from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.pool import Pool
from fsdpcheck.engines._real.transport import Link, LocalLink
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import OtherWorldSize, UsageError
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.processes.limit import Limit

_NEVER = timedelta(days=30)
_STOP = b"stop"


def is_under_torchrun() -> bool:
    """Whether torchrun (torch.distributed.run) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size() -> int:
    """How many processes torchrun started."""
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    """Which of them this is."""
    return int(os.environ["RANK"])


class TorchrunEngine(hosts.Hosted):
    """The driver, in rank 0: runs requests whose world size is torchrun's. ``budget_seconds``: see ProcessesEngine."""

    name = TORCHRUN

    def __init__(self, budget_seconds: float | None = None) -> None:
        _one_machine()
        self._budget, self._limit, self._store = budget_seconds, Limit(), _control_store()
        self._pool: Pool | None = None
        self._pools = 0
        self._closed = False
        atexit.register(self.close)

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on torchrun's ranks. Raises OtherWorldSize when its world size is another."""
        if request.case.world_size != world_size():
            raise OtherWorldSize(
                f"this case needs another number of ranks than torchrun started\n"
                f"  got     a case of world size {request.case.world_size}\n"
                f"  wanted  world size {world_size()}\n"
                f"  next    torchrun --nproc-per-node {request.case.world_size}, or --engine processes",
                world_size(),
            )
        hosts.declared(request.adapter)
        hosts.require(request.adapter, request.installs)
        pool = self._pool = self._pool or self._new_pool()
        try:
            execution = monitor.run(pool, self.name, request, self._budget, self._limit)
        except BaseException:
            self._discard()
            raise
        if execution.failure is not None or pool.spent:
            self._discard()
        return execution

    def settle(self) -> tuple[str, ...]:
        """Each run compares all: nothing is left."""
        return ()

    def close(self) -> None:
        """End the workers, and let the other ranks' ``serve`` return."""
        if not self._closed:
            self._closed = True
            self._discard()
            self._store.set(_order(self._pools + 1), _STOP)

    def _new_pool(self) -> Pool:
        self._pools += 1
        return Pool(world_size(), self._link)

    def _link(self, place: Place) -> Link:
        if place.rank == 0:
            self._store.set(_order(self._pools), pickle.dumps(place))
            return LocalLink(place)
        return StoreLink(self._store, self._pools, place.rank)

    def _discard(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def serve() -> None:
    """What every other rank does: keep a worker that is this rank, until the driver says stop."""
    _one_machine()
    store, pool = _control_store(), 1
    while (order := store.get(_order(pool))) != _STOP:
        first: Place = pickle.loads(order)
        place = Place(rank(), first.world_size, first.port, first.folder)
        _Relay(store, pool, LocalLink(place)).until_ended()
        pool += 1


def _order(pool: int) -> str:
    return f"order {pool}"


@dataclass(frozen=True)
class _Keys:
    """The keys through which the driver and one rank's relay talk about one worker."""

    pool: int
    rank: int

    def to_worker(self, number: int) -> str:
        return f"{self.pool}/{self.rank}/to worker/{number}"

    def to_driver(self, number: int) -> str:
        return f"{self.pool}/{self.rank}/to driver/{number}"

    def said(self, what: str) -> str:
        return f"{self.pool}/{self.rank}/{what}"


class StoreLink:
    """The driver's side of a worker that another torchrun process keeps."""

    def __init__(self, store: Any, pool: int, rank: int) -> None:
        self._store, self._keys = store, _Keys(pool, rank)
        self._sent = self._received = 0

    @property
    def pid(self) -> int:
        return int(self._store.get(self._keys.said("pid")))

    def send(self, payload: bytes) -> None:
        _give(self._store, self._keys.to_worker(self._sent), payload)
        self._sent += 1

    def receive(self) -> bytes | None:
        payload = _taken(self._store, self._keys.to_driver(self._received))
        self._received += payload is not None
        return payload

    def exit_code(self) -> int | None:
        key = self._keys.said("exit")
        return int(self._store.get(key)) if self._store.check([key]) else None

    def sources(self) -> list[Any]:
        return []

    def end(self) -> None:
        """Kill the worker (it is on this machine) and wait until its keeper has reaped it."""
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._store.get(self._keys.said("exit"))


class _Relay:
    """The keeper's side: carries payloads between the store and its worker until the worker ends."""

    def __init__(self, store: Any, pool: int, link: LocalLink) -> None:
        self._store, self._keys, self._link = store, _Keys(pool, rank()), link
        self._store.set(self._keys.said("pid"), str(link.pid))

    def until_ended(self) -> None:
        to_worker = to_driver = 0
        while self._link.exit_code() is None:
            connection.wait(self._link.sources(), timeout=_POLL_SECONDS)
            if (payload := self._link.receive()) is not None:
                _give(self._store, self._keys.to_driver(to_driver), payload)
                to_driver += 1
            if (payload := _taken(self._store, self._keys.to_worker(to_worker))) is not None:
                self._link.send(payload)
                to_worker += 1
        self._store.set(self._keys.said("exit"), str(self._link.exit_code()))
        self._link.end()


_POLL_SECONDS = 0.002


_PIECE = 1 << 22
"""Bytes of the largest value that is set at once: TCPStore (libuv) ends a connection that sends more than 8 MiB."""


def _give(store: Any, key: str, payload: bytes) -> None:
    """Set ``key`` to ``payload`` in pieces; the key itself says how many they are, and comes last."""
    pieces = [payload[start : start + _PIECE] for start in range(0, len(payload), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def _taken(store: Any, key: str) -> bytes | None:
    """What was given as ``key``, which is removed, if it is there."""
    if not store.check([key]):
        return None
    names = [f"{key}/{number}" for number in range(int(store.get(key)))]
    payload = b"".join(bytes(store.get(name)) for name in names)
    for name in (key, *names):
        store.delete_key(name)
    return payload


def _control_store() -> Any:
    """torchrun's store. Typed loosely: the stubs deny that a store takes bytes."""
    store: Any = next(rendezvous("env://"))[0]
    store.set_timeout(_NEVER)
    return c10d.PrefixStore("fsdpcheck", store)


def _one_machine() -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not is_under_torchrun() or local != world_size():
        raise UsageError(
            f"ranks under torchrun must be on one machine so far\n  got     {local} of the ranks on this machine\n"
            f"  wanted  torchrun --nproc-per-node N with one node\n  next    leave out --nnodes"
        )
