"""Pool: W persistent workers, each one real rank, that a driver feeds requests.

Nothing in the data path knows of a hang: the driver proves it from the table where ranks publish (see
engines/_real/monitor.py), in milliseconds. A worker that dies is a failure of the run, known from the operating system.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path

import torch._C._distributed_c10d as c10d

from fsdpcheck import process_state
from fsdpcheck.engines._real import shared_table
from fsdpcheck.engines._real import stacks as _stacks
from fsdpcheck.engines._real.follower import Place, Reply
from fsdpcheck.engines._real.launch import LOOPBACK
from fsdpcheck.engines._real.remote_workers import FarLink, RowsOfNodes
from fsdpcheck.engines._real.transport import Link
from fsdpcheck.engines._simulated.questions import Settle
from fsdpcheck.errors import FsdpcheckError, excerpt
from fsdpcheck.execution import RunRequest
from fsdpcheck.processes import leftovers, messages

_POLL_SECONDS = 0.005
"""How often the driver looks at the table while it waits for replies; no verdict depends on it."""


class Pool:
    """W workers and what they share. After a failure, or when one is ``spent``, it must be closed, never reused.

    ``link(place)`` starts a worker. ``host``: where workers find the store, which is this process's.
    """

    def __init__(self, world_size: int, link: Callable[[Place], Link], host: str = LOOPBACK) -> None:
        self.world_size, self._runs, self.spent = world_size, 0, False
        self.folder = Path(tempfile.mkdtemp(prefix=leftovers.folder_prefix()))
        self.links: list[Link] = []
        try:
            self._store = c10d.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
            self.places = [Place(rank, world_size, port, self.folder, host) for rank in range(world_size)]
            shared_table.create(self.places[0].table, world_size)
            self.table = RowsOfNodes(self.places[0].table, world_size)
            for rank, place in enumerate(self.places):
                self.links.append(made := link(place))
                if isinstance(made, FarLink):
                    self.table.far[rank] = made
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def runs(self) -> int:
        """How many requests it has been sent."""
        return self._runs

    def send(self, request: RunRequest) -> None:
        """Give every worker its next request."""
        self._runs += 1
        self._tell(request)

    def settle(self) -> tuple[str, ...]:
        """What ranks have left changed that no run has compared, a sentence each; put back. To be called between runs.

        A worker that ends instead is said too, and makes the pool ``spent``.
        """
        self._tell(Settle())
        left, ended = dict[int, tuple[str, ...]](), list[str]()
        for rank, payload in self._next_of_each():
            if payload is None:
                ended.append(f"rank {rank} left a process that ended between two runs: {self.last_words(rank)}")
                self.spent = True
            else:
                left[rank] = messages.loads(payload)
        return (*process_state.sentences(process_state.of_each(left), self.world_size), *ended)

    def collect(self, rank: int) -> Reply | None:
        """The reply of a rank, if it has sent one."""
        payload = self.links[rank].receive()
        return messages.loads(payload) if payload is not None else None

    def wait(self) -> None:
        """Return when some rank has replied or died, or when it is time to look at the table."""
        connection.wait([source for link in self.links for source in link.sources()], timeout=_POLL_SECONDS)

    def stacks(self, ranks: list[int]) -> dict[int, _stacks.Stack]:
        """Where the programs of these ranks stand. A rank that dies meanwhile has none."""
        files = {rank: self.places[rank].stack for rank in ranks if rank not in self.table.far}
        pids = {rank: self.links[rank].pid for rank in files}
        near = _stacks.collect(files, pids, lambda rank: self.links[rank].exit_code() is None)
        return near | {rank: self.table.far[rank].stack() for rank in ranks if rank in self.table.far}

    def last_words(self, rank: int) -> str:
        """The end of what a worker wrote to stderr."""
        path = self.places[rank].stderr
        told = self.links[rank].last_words(path)
        return end_of(path) if told is None else told

    def close(self) -> None:
        """Kill and reap every worker, and remove what they shared. May be called twice."""
        for link in self.links:
            link.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, message: RunRequest | Settle) -> None:
        payload = messages.dumps(message)
        for link in self.links:
            link.send(payload)

    def _await_ready(self) -> None:
        """Wait for all: none of them is ready before all have come, so whoever died is not waited for."""
        for rank, payload in self._next_of_each():
            if payload is None:
                code, words = self.links[rank].exit_code(), self.last_words(rank)
                raise FsdpcheckError(f"the worker of rank {rank} ended with {code} before its first run\n{words}")

    def _next_of_each(self) -> Iterator[tuple[int, bytes | None]]:
        """What each rank sends next, as it comes; None of one that has ended instead."""
        waiting = set(range(self.world_size))
        while waiting:
            self.wait()
            for rank in sorted(waiting):
                ended = self.links[rank].exit_code() is not None  # before what it sent: of one that ended, that is all
                if (payload := self.links[rank].receive()) is not None or ended:
                    waiting.discard(rank)
                    yield rank, payload


def settled(pools: dict[int, Pool], discard: Callable[[int], None]) -> tuple[str, ...]:
    """What the ranks of all pools have left (``Pool.settle``); ``discard(world_size)`` ends what is spent by then."""
    left = tuple(told for pool in pools.values() for told in pool.settle())
    for world_size in [size for size, pool in pools.items() if pool.spent]:
        discard(world_size)
    return left


def end_of(path: Path) -> str:
    """The last lines of a file; "" where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(-min(8 * excerpt.MOST, path.stat().st_size), os.SEEK_END)
        text = file.read().decode(errors="replace")
    return excerpt.excerpt("\n".join(text.splitlines()[-10:]))
