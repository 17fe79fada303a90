"""Simulated ranks: W persistent threads, one running at a time, that meet in memory.

Unmodified torch.distributed programs run. The order in which ranks run is the schedule's, so a run repeats bit for bit,
and a deadlock is known the moment no rank can move: no time-out anywhere. Deterministic ranks joined by blocking,
non-wildcard collectives form a Kahn network, whose traces and results do not depend on the schedule (Kahn 1974);
``Execution.voids`` says what in a run breaks that hypothesis.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from fsdpcheck import adapters, process_state
from fsdpcheck.adapters.contract import Stored
from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import TrainingCase, user_model
from fsdpcheck.engines._common import imports, patches, poison
from fsdpcheck.engines._simulated.shared_state import SharedByRanks
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.execution.assembly import assemble
from fsdpcheck.processes.limit import Limit
from fsdpcheck.program import checkpoints, rank_program
from fsdpcheck.simulation.current_rank import current_rank
from fsdpcheck.simulation.globals import module_global
from fsdpcheck.simulation.run import SimulatedRun, World
from fsdpcheck.simulation.shared_locks import set_apart
from fsdpcheck.simulation.streams import ON_HOST, OnGpu, OnHost
from fsdpcheck.simulation.threads import Pool
from fsdpcheck.workload import numerics

Program = Callable[[RunRequest, int, torch.device, RankResult], None]

_COLLECT_ALL_EVERY, _COLLECT_MIDDLE_EVERY = 500, 20
"""Runs between full collections (0.2 s, most of it spent on torch's own modules), and between those of what is younger.

A run leaves no cycles of the harness's own behind; an implementation's are few and small tensors.
"""


class InProcessEngine:
    """Runs requests on simulated ranks of this very process, where their code is imported.

    One pool of rank threads a world size, replaced after any failure.

    ``budget_seconds``: a limit the user sets on one run for ranks that never stop computing; the failure is then
    "no progress" with every rank's stack, and never a deadlock. ``limit_seconds``: what a run may use up when nobody
    set one (processes/limit.py). ``program`` is what each rank runs.
    """

    name = "simulated"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        budget_seconds: float | None = None,
        program: Program = rank_program,
        limit_seconds: float | None = None,
    ) -> None:
        self._limit = Limit(limit_seconds)
        self.kind = "simulated" if str(device) == "cpu" else "simulated-cuda"
        self._device, self._budget, self._program = torch.device(device), budget_seconds, program
        self._streams = OnGpu() if self._device.type == "cuda" else ON_HOST
        self._pools: dict[int, Pool] = {}
        weakref.finalize(self, _close_all, self._pools)  # also at the interpreter's exit
        self._runs = 0
        self._shared: dict[str, SharedByRanks] = {}

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on its world size of ranks. See engines/base.py for the guarantee."""
        return assemble(self.run_in_pieces(request))

    def run_in_pieces(self, request: RunRequest) -> Execution:
        """The same, with pieces of tensors as ranks have shown them."""
        world_size = request.case.world_size
        if current_rank() is not None:
            raise UsageError("a simulated rank cannot start another simulated run")
        shared = None
        if not adapters.is_builtin(request.adapter):
            set_apart(adapters.canonical(request.adapter), world_size)
            shared = self._shared_by(request.adapter) if world_size > 1 else None
        own = imports.patches(request)
        pool = self._pools.get(world_size)
        if pool is None:
            pool = self._pools[world_size] = Pool(world_size)
        try:
            with ExitStack() as stack:
                stack.enter_context(_quiet_collector(self._sweep))
                stack.enter_context(numerics.switched(request.case))
                kept = stack.enter_context(process_state.Kept(own, world_size))
                stack.enter_context(poison.of_ranks(request.memory))
                stack.enter_context(numerics.of(request.case))
                hits = stack.enter_context(patches.installed(request.installs))
                begun = SimulatedRun(
                    _world(request, self._streams), shared.begin(request) if shared is not None else None
                )
                results = [RankResult(rank) for rank in range(world_size)]

                def on_rank(rank: int) -> None:
                    with kept.on_rank(rank):
                        self._program(request, rank, self._device, results[rank])

                run = pool.run(begun, on_rank, self._budget, self._limit)
                execution = _execution(request, results, run)
                execution.shared = shared.end() if shared is not None else ()
                execution.install_hits = hits.read()
        except BaseException:
            self._discard(world_size)
            raise
        if run.failure is not None or kept.spent:
            self._discard(world_size)
        left = process_state.sentences({**kept.left, **run.lasting}, world_size)
        execution.left = (*left, *imports.told(request))
        return execution

    def declared(self, reference: str) -> Declaration:
        """See engines/base.py."""
        return adapters.declared(reference)

    def stored(self, reference: str, folder: str) -> list[Stored]:
        """See engines/base.py."""
        return checkpoints.stored(reference, folder)

    def read(self, reference: str, folder: str, case: TrainingCase) -> dict[str, torch.Tensor]:
        """See engines/base.py."""
        return checkpoints.read(reference, folder, case)

    def settle(self) -> tuple[str, ...]:
        """See engines/base.py."""
        return process_state.sentences(process_state.settled())

    def close(self) -> None:
        _close_all(self._pools)

    def _shared_by(self, adapter: str) -> SharedByRanks:
        """What ranks of an implementation share, as far as it was seen."""
        reference = adapters.canonical(adapter)
        return self._shared.setdefault(reference, SharedByRanks(reference))

    def _discard(self, world_size: int) -> None:
        pool = self._pools.pop(world_size, None)
        if pool is not None:
            pool.close()

    def _sweep(self) -> None:
        self._runs += 1
        if self._runs % _COLLECT_MIDDLE_EVERY:
            gc.collect(0)
        else:
            gc.collect(1 if self._runs % _COLLECT_ALL_EVERY else 2)


def _world(request: RunRequest, streams: OnHost) -> World:
    case = request.case
    return World(
        case.world_size,
        request.schedule,
        case.arithmetic.averaging if isinstance(case, TrainingCase) else "divide",
        tuple(map(module_global, adapters.features(request.adapter).rank_local)),
        _foreign_code(request),
        around=streams.of_rank,
        streams=streams,
    )


def _foreign_code(request: RunRequest) -> str:
    """Names what is not fsdpcheck's own of what ranks run: it may have told DTensor of rules of its own."""
    own = user_model(request.case)
    adapter = [] if adapters.is_builtin(request.adapter) else [request.adapter]
    installs = [name for name in request.installs if not name.startswith("fsdpcheck.")]
    return " ".join([*adapter, *([own.build] if own is not None else []), *installs])


def _execution(request: RunRequest, results: list[RankResult], run: SimulatedRun) -> Execution:
    for rank, result in enumerate(results):
        result.trace = tuple(run.traces[rank])
    voids = tuple(sorted(run.voids))
    return Execution("simulated", request, results, run.failure, voids=voids, hand_overs=run.baton.hand_overs)


def _close_all(pools: dict[int, Pool]) -> None:
    while pools:
        pools.popitem()[1].close()


@contextmanager
def _quiet_collector(sweep: Callable[[], None]) -> Iterator[None]:
    """No garbage collection while ranks run (a finaliser would run as whatever rank is on); afterwards ``sweep``."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sweep()
        if was_on:
            gc.enable()
