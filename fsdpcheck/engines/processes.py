"""Processes: real ranks on this machine, over gloo on loopback, or over NCCL on its GPUs."""

from __future__ import annotations

import atexit
import weakref
from dataclasses import replace

from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.engines._common import hosts
from fsdpcheck.engines._common import metal as metals
from fsdpcheck.engines._common.hosts import at_most
from fsdpcheck.engines._common.metal import GLOO, Metal
from fsdpcheck.engines._real import monitor
from fsdpcheck.engines._real.pool import Pool, settled
from fsdpcheck.engines._real.transport import LocalLink
from fsdpcheck.errors import OtherWorldSize, explain
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.processes.limit import Limit


class ProcessesEngine(hosts.Hosted):
    """Runs requests on real processes; one pool of workers a world size, replaced after any failure.

    ``metal``: on what they compute, and over what they speak; NCCL takes a GPU for each rank.
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
        metal: Metal = GLOO,
    ) -> None:
        self.metal, self.kind = metal, metals.kind_of("processes", metal.device, metal.backend)
        self._budget, self._start_method, self._limit = budget_seconds, start_method, Limit(limit_seconds)
        self._pools: dict[int, Pool] = {}
        atexit.register(_close_if_alive, weakref.ref(self))

    def declared(self, reference: str) -> Declaration:
        """See engines/base.py. Where each rank takes a GPU, who takes more is said to take as many as there
        are."""
        return at_most(super().declared(reference), self.metal.most_ranks)

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on its world size of processes. See engines/base.py for the guarantee.

        Raises OtherWorldSize where it needs more ranks than there are GPUs, where each takes one.
        """
        if lacks := self.metal.lacks(request.case.world_size):
            raise OtherWorldSize(explain("this case needs more ranks", got=lacks), self.metal.most_ranks or 1)
        hosts.declared(request.adapter)
        hosts.require(request.adapter, request.installs)
        world_size = request.case.world_size
        if world_size not in self._pools:
            self._pools[world_size] = Pool(
                world_size,
                lambda place: LocalLink(replace(place, metal=self.metal), self._start_method, request.adapter),
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
        """See engines/base.py."""
        return settled(self._pools, self._discard)

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
