"""Processes: real ranks on this machine, gloo on loopback."""

from __future__ import annotations

import atexit
import weakref

from fsdpcheck.engines._common import hosts
from fsdpcheck.engines._real import monitor
from fsdpcheck.engines._real.pool import Pool
from fsdpcheck.engines._real.transport import LocalLink
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.processes.limit import Limit


class ProcessesEngine(hosts.Hosted):
    """Runs requests on real gloo processes; one pool of workers a world size, replaced after any failure.

    ``budget_seconds``: a limit the user sets on one run, for ranks that never stop computing; the failure is then
    "no progress", and never a deadlock. ``limit_seconds``: what a run may use up when nobody set one.
    ``start_method``: "forkserver" starts a worker in tens of milliseconds from a server that has imported torch,
    "spawn" in seconds from nothing. A request's schedule is ignored: the machine's is taken.
    """

    name = "processes"

    def __init__(
        self,
        budget_seconds: float | None = None,
        start_method: str = "forkserver",
        limit_seconds: float | None = None,
    ) -> None:
        self._budget, self._start_method, self._limit = budget_seconds, start_method, Limit(limit_seconds)
        self._pools: dict[int, Pool] = {}
        atexit.register(_close_if_alive, weakref.ref(self))

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on its world size of processes. See engines/base.py for the guarantee."""
        hosts.declared(request.adapter)
        hosts.require(request.adapter, request.installs)
        world_size = request.case.world_size
        if world_size not in self._pools:
            self._pools[world_size] = Pool(
                world_size, lambda place: LocalLink(place, self._start_method, request.adapter)
            )
        try:
            execution = monitor.run(self._pools[world_size], self.name, request, self._budget, self._limit)
        except BaseException:
            self._discard(world_size)
            raise
        if execution.failure is not None or self._pools[world_size].spent:
            self._discard(world_size)
        return execution

    def settle(self) -> tuple[str, ...]:
        """Each run compares all: nothing is left."""
        return ()

    def close(self) -> None:
        for world_size in list(self._pools):
            self._discard(world_size)

    def _discard(self, world_size: int) -> None:
        pool = self._pools.pop(world_size, None)
        if pool is not None:
            pool.close()


def _close_if_alive(engine: weakref.ref[ProcessesEngine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()
