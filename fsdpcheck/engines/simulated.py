"""Simulated ranks: W persistent threads, one running at a time, that meet in memory.

Unmodified torch.distributed programs run. The order in which ranks run is the schedule's, so a run repeats bit for bit,
and a deadlock is known the moment no rank can move: no time-out anywhere. Deterministic ranks joined by blocking,
non-wildcard collectives form a Kahn network, whose traces and results do not depend on the schedule (Kahn 1974);
``Execution.voids`` says what in a run breaks that hypothesis.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdpcheck import adapters, deadlock, torch_private
from fsdpcheck.engines import _installs
from fsdpcheck.engines._baton import CHOICES, Aborted, Baton, place
from fsdpcheck.engines._globals import RankGlobals
from fsdpcheck.engines._rendezvous import Instance, Meeting, current_rank, set_current_rank
from fsdpcheck.engines._store import SimulatedStore
from fsdpcheck.errors import AdapterError, NotSupported, UsageError
from fsdpcheck.execution import Execution, Failure, RankResult, RankState, RunRequest
from fsdpcheck.program import rank_program
from fsdpcheck.trace import Collective

Program = Callable[[RunRequest, int, torch.device, RankResult], None]

_COLLECT_ALL_EVERY = 100
_ANALYSED_WHOLE = 10_000
"""Calls of a run up to which a stand-still is explained with every rank's number of calls."""


class SimulatedEngine:
    """Runs requests on simulated ranks; one pool of rank threads a world size, replaced after any failure.

    ``budget_seconds``: a limit the user sets on one run for ranks that never stop computing; the failure is then
    "no progress" with every rank's stack, and never a deadlock. None: no limit. ``program`` is what each rank runs.
    """

    name = "simulated"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        budget_seconds: float | None = None,
        program: Program = rank_program,
    ) -> None:
        self._device, self._budget, self._program = torch.device(device), budget_seconds, program
        self._pools: dict[int, Pool] = {}
        self._runs = 0

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on its world size of ranks. See engines/base.py for the guarantee."""
        world_size = request.case.world_size
        if current_rank() is not None:
            raise UsageError("a simulated rank cannot start another simulated run")
        adapter = adapters.load(request.adapter)
        pool = self._pools.get(world_size)
        if pool is None:
            pool = self._pools[world_size] = Pool(world_size)
        try:
            with ExitStack() as stack:
                stack.enter_context(_quiet_collector(self._sweep))
                hits = stack.enter_context(_installs.installed(request.installs))
                job = partial(self._program, request)
                run = pool.run(SimulatedRun(request, adapter.features.rank_local), job, self._device, self._budget)
                run.execution.install_hits = hits.read()
        except BaseException:
            self._discard(world_size)
            raise
        if run.execution.failure is not None:
            self._discard(world_size)
        return run.execution

    def close(self) -> None:
        for world_size in list(self._pools):
            self._discard(world_size)

    def _discard(self, world_size: int) -> None:
        pool = self._pools.pop(world_size, None)
        if pool is not None:
            pool.close()

    def _sweep(self) -> None:
        self._runs += 1
        gc.collect(2 if self._runs % _COLLECT_ALL_EVERY == 0 else 0)


@contextmanager
def _quiet_collector(sweep: Any) -> Iterator[None]:
    """No garbage collection while ranks run (a finaliser would run as whatever rank is on); afterwards ``sweep``."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sweep()
        if was_on:
            gc.enable()


class SimulatedRun:
    """The state of one run, shared by its ranks; only the rank that holds the baton touches it."""

    def __init__(self, request: RunRequest, rank_local: tuple[str, ...]) -> None:
        world_size = request.case.world_size
        self.globals = RankGlobals(world_size, rank_local)
        choose = CHOICES[request.schedule]
        self.baton = Baton(world_size, choose, self.globals.leave, self.globals.enter, self._stuck)
        self.blocked_in: dict[int, Collective] = {}
        self.instances: dict[tuple[object, ...], Instance] = {}
        self.traces: dict[int, list[Collective]] = {rank: [] for rank in range(world_size)}
        self.voids: set[str] = set()
        self.initialised: set[int] = set()
        """Ranks past group initialisation: from here on the use of the store is the program's own."""
        self.ended: dict[int, deadlock.State] = {}
        self.adapter_error: Failure | None = None
        self.results = [RankResult(rank) for rank in range(world_size)]
        self.execution = Execution("simulated", request, self.results)

    def fail(self, failure: Failure) -> None:
        """Record the run's one failure (the first wins) and unwind all ranks."""
        if self.execution.failure is None:
            self.execution.failure = failure
        self.baton.abort()

    def end_rank(self, rank: int, state: deadlock.State) -> None:
        self.ended[rank] = state

    def finish(self) -> None:
        """After all ranks have ended: fill in the execution."""
        self.execution.hand_overs = self.baton.hand_overs
        self.execution.voids = tuple(sorted(self.voids))
        for rank, result in enumerate(self.results):
            result.trace = tuple(self.traces[rank])
        if self.execution.failure is None and not all(isinstance(s, deadlock.Finished) for s in self.ended.values()):
            self.execution.failure = self.adapter_error or deadlock.explain(self.ended)

    def _stuck(self, since: float) -> None:
        states: dict[int, deadlock.State] = dict(self.ended)
        for rank, collective in self.blocked_in.items():
            where, stack = place(self.baton.frame(rank))
            states[rank] = deadlock.Blocked(rank, collective, where, stack)
        failure = self.adapter_error or deadlock.explain(states, self._issued(), time.perf_counter() - since)
        self.fail(failure)

    def _issued(self) -> dict[int, list[Collective]]:
        """The calls that the analysis of a stand-still needs: all, or in a very long run only the unmatched ones."""
        if sum(map(len, self.traces.values())) <= _ANALYSED_WHOLE:
            return self.traces
        calls: dict[int, list[Collective]] = {rank: [] for rank in self.traces}
        for there in self.instances.values():
            for rank, call in there.calls.items():
                calls[rank].append(call.collective)
        return calls


class Pool:
    """W rank threads inside one isolated world, waiting for runs. After a failure it must be closed, never reused."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store = SimulatedStore(lambda: self.current)
        self.current: SimulatedRun | None = None
        self._world = torch_private.thread_local_world()
        self._job: Any = None
        self._go = [threading.Lock() for _ in range(world_size)]
        for lock in self._go:
            lock.acquire()
        _register_backend()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        for thread in self._threads:
            thread.start()
        self._started = False

    def run(
        self,
        run: SimulatedRun,
        program: Callable[[int, torch.device, RankResult], None],
        device: torch.device,
        budget: float | None,
    ) -> SimulatedRun:
        """Run to the end or a failure. Raises only what the caller's own thread does (KeyboardInterrupt)."""
        self.current = run
        first, self._started = not self._started, True

        def job(rank: int) -> None:
            if first:
                dist.init_process_group(
                    torch_private.BACKEND, rank=rank, world_size=self.world_size, store=cast(Any, self.store)
                )
            groups = torch_private.groups_of_this_thread()
            run.initialised.add(rank)
            program(rank, device, run.results[rank])
            torch_private.forget_groups_but(groups)

        self._job = job
        with torch_private.isolated_threads(self._world), _guarded_exits():
            for lock in self._go:
                lock.release()
            run.baton.begin()
            try:
                ended = run.baton.join(budget)
            except BaseException:
                run.fail(Failure("exited", "interrupted by the user"))
                raise
            finally:
                run.globals.restore()
        if not ended:
            run.execution.failure = _no_progress(run, budget)
            run.baton.abort()
            return run
        run.finish()
        return run

    def close(self) -> None:
        """Let idle rank threads end. A thread that is still computing is left behind as a daemon."""
        self._job = None
        for lock in self._go:
            if lock.locked():
                lock.release()

    def _serve(self, rank: int) -> None:
        set_current_rank(rank)
        keep_on_this_thread = torch.autograd.set_multithreading_enabled(False)
        while True:
            self._go[rank].acquire()
            if self._job is None:
                break
            self._one(rank)
        del keep_on_this_thread

    def _one(self, rank: int) -> None:
        run, job = self.current, self._job
        assert run is not None
        state: deadlock.State = deadlock.Finished(rank)
        try:
            run.baton.start(rank)
            job(rank)
        except Aborted:
            state = deadlock.Raised(rank, "unwound after another rank's failure", "Aborted")
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            state = deadlock.Exited(rank, code)
        except BaseException as error:
            state = _raised(rank, error)
            if isinstance(error, AdapterError | NotSupported) and run.adapter_error is None:
                run.adapter_error = Failure("adapter", str(error), (RankState(rank, "raised"),), type(error).__name__)
        finally:
            run.end_rank(rank, state)
            run.baton.end(rank)


def _raised(rank: int, error: BaseException) -> deadlock.Raised:
    lines = traceback.format_exception(error)
    innermost = error.__traceback__
    where = ""
    while innermost is not None:
        code = innermost.tb_frame.f_code
        if not torch_private.is_plumbing(code.co_filename):
            where = f"{code.co_filename}:{innermost.tb_lineno}"
        innermost = innermost.tb_next
    return deadlock.Raised(rank, "".join(lines), type(error).__name__, where)


def _no_progress(run: SimulatedRun, budget: float | None) -> Failure:
    stacks = {rank: place(run.baton.frame(rank)) for rank in range(len(run.results))}
    states = tuple(
        RankState(rank, "blocked" if rank in run.blocked_in else "running", str(run.blocked_in.get(rank, "")), *at)
        for rank, at in stacks.items()
        if rank not in run.ended
    )
    text = [f"no progress: the budget of {budget} s ran out while a rank could still run"]
    text += [f"  rank {state.rank}: {state.state} at {state.where or 'its start'}" for state in states]
    return Failure("no progress", "\n".join(text), states)


@contextmanager
def _guarded_exits() -> Iterator[None]:
    """os._exit and os.abort on a rank's thread end that rank, not the process that simulates all of them."""
    exit_now, abort = os._exit, os.abort

    def leave(code: int) -> None:
        if current_rank() is None:
            exit_now(code)
        raise SystemExit(code)

    os._exit = leave  # type: ignore[assignment]
    os.abort = lambda: leave(134)  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        os._exit, os.abort = exit_now, abort


def _register_backend() -> None:
    if torch_private.BACKEND.upper() in dist.Backend.__dict__:
        return
    dist.Backend.register_backend(torch_private.BACKEND, _create_group, devices=["cpu", "cuda"])


def _create_group(store: Any, rank: int, size: int, timeout: Any) -> Meeting:
    thread = threading.current_thread()
    pool: Pool = thread._target.__self__  # type: ignore[attr-defined]
    return Meeting(rank, size, lambda: pool.current)  # type: ignore[arg-type,return-value]
