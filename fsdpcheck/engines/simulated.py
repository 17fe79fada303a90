"""Simulated ranks: W threads of another process, one running at a time, that meet in memory.

Unmodified torch.distributed programs run. The order in which ranks run is the schedule's, so a run repeats bit for bit,
and a deadlock is known the moment no rank can move: no time-out anywhere. Deterministic ranks joined by blocking,
non-wildcard collectives form a Kahn network, whose traces and results do not depend on the schedule (Kahn 1974);
``Execution.voids`` says what in a run breaks that hypothesis.

The process is one for each implementation (engines/_common/hosts.py). What the implementation does to it reaches nobody
who judges: a request goes there and an execution comes back, as plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from fsdpcheck.engines._common import hosts
from fsdpcheck.engines._common import metal as metals
from fsdpcheck.engines._common.metal import MEMORY, Metal
from fsdpcheck.engines._simulated.questions import Close, Settings, Settle, Simulate
from fsdpcheck.execution import Execution, Failure, RankResult, RunRequest
from fsdpcheck.execution.assembly import assemble
from fsdpcheck.processes.limit import limit_seconds as limit_of_runs
from fsdpcheck.processes.remote import Died


class SimulatedEngine(hosts.Hosted):
    """Runs requests on simulated ranks; the process of an implementation is replaced when a run has ended it.

    ``budget_seconds``: a limit the user sets on one run for ranks that never stop computing; the failure is then
    "no progress" with every rank's stack, and never a deadlock. ``limit_seconds``: what a run may use up when nobody
    set one (processes/limit.py). ``metal``: ranks compute on the processors, or all on one GPU, on a stream each.
    """

    name = "simulated"

    def __init__(
        self,
        budget_seconds: float | None = None,
        limit_seconds: float | None = None,
        metal: Metal = MEMORY,
    ) -> None:
        self.kind = metals.kind_of("simulated", metal.device, metal.backend)
        limit = limit_of_runs() if limit_seconds is None else limit_seconds
        self._settings = Settings(metal.device, budget_seconds, limit)
        self.meanwhile: Callable[[], None] | None = None
        """What is done once, while the ranks of the next run compute in their own process."""

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on its world size of ranks. See engines/base.py for the guarantee."""
        host, (work, self.meanwhile) = hosts.of(request.adapter), (self.meanwhile, None)
        host.send(Simulate(request, self._settings))
        try:
            if work is not None:
                work()
        except BaseException:
            host.close()  # nobody waits for its answer
            raise
        try:
            execution: Execution = host.answer()
        except Died as death:
            return self._lost(request, str(death))
        execution.request = request
        return assemble(execution)

    def settle(self) -> tuple[str, ...]:
        """See engines/base.py."""
        found: list[str] = []
        for host in hosts.running():
            try:
                found += host.ask(Settle())
            except Died as death:
                found.append(f"ranks left a process that ended between two runs: {death}")
        return tuple(found)

    def close(self) -> None:
        for host in hosts.running():
            with suppress(Died):
                host.ask(Close(self._settings))

    def _lost(self, request: RunRequest, death: str) -> Execution:
        text = f"the process of the simulated ranks ended in the middle of a run: {death}"
        ranks = [RankResult(rank) for rank in range(request.case.world_size)]
        return Execution(self.name, request, ranks, Failure("lost", text))
