"""Rank threads: one pool a world size, W persistent threads in one isolated world, waiting for runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdpcheck import adapters
from fsdpcheck.case import user_model
from fsdpcheck.compat import dtensor_private, torch_private
from fsdpcheck.engines._common.outcomes import adapter_failure, ending
from fsdpcheck.engines._simulated import affinity
from fsdpcheck.engines._simulated.rendezvous import Meeting, current_rank, require_rank
from fsdpcheck.engines._simulated.run import SimulatedRun, no_progress
from fsdpcheck.engines._simulated.scheduler import Aborted
from fsdpcheck.engines._simulated.shared_locks import stuck_in_a_lock
from fsdpcheck.engines._simulated.store import SimulatedStore
from fsdpcheck.engines._simulated.turns import Turn, here, threads_of_ranks
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution import Failure, RankResult, RunRequest, deadlock
from fsdpcheck.processes.limit import LOOK_SECONDS, Limit, Spent, sleep_of


class Pool:
    """W rank threads inside one isolated world, waiting for runs. After a failure it must be closed, never reused."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store = SimulatedStore(lambda: self.current)
        self.current: SimulatedRun | None = None
        self._meshes = dtensor_private.Meshes(current_rank)
        self._world = torch_private.thread_local_world(lambda: self.current and require_rank())
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

    def run(
        self,
        run: SimulatedRun,
        program: Callable[[int, torch.device, RankResult], None],
        device: torch.device,
        budget: float | None,
        limit: Limit,
    ) -> SimulatedRun:
        """Run to the end or a failure. Raises only what the caller's own thread does (KeyboardInterrupt)."""
        self.current = run
        self.store.clear()
        foreign = _foreign_code(run.execution.request)

        def job(rank: int) -> None:
            if not dist.is_initialized():  # its first run, or the program of the last one has destroyed its groups
                dist.init_process_group(
                    torch_private.BACKEND, rank=rank, world_size=self.world_size, store=cast(Any, self.store)
                )
            groups = torch_private.groups_of_this_thread()
            run.initialised.add(rank)
            self._meshes.begin(rank, foreign)
            program(rank, device, run.results[rank])
            assert here.turn is not None
            here.turn.finish()
            torch_private.forget_groups_but(groups)
            self._meshes.end(rank)

        self._job = job
        affinity.gather_on_one_core(self._threads)
        with (
            torch_private.isolated_threads(self._world),
            self._meshes.in_place(),
            torch_private.groups_of_ranks(current_rank, self._meet),
            torch_private.one_profiler(current_rank, _second_profiler),
            threads_of_ranks(),
            _guarded_exits(run.left),
        ):
            for lock in self._go:
                lock.release()
            run.baton.begin()
            try:
                stood = _stood_still(run, budget, limit)
            except BaseException:
                run.fail(Failure("exited", "interrupted by the user"))
                raise
            finally:
                run.globals.restore()
        if stood is not None:
            run.execution.failure = run.execution.failure or stood
            run.baton.disown()
            return run
        run.finish()
        return run

    def _meet(self, url: str, rank: int, world_size: int) -> tuple[Any, int, int]:
        """Where a rank that calls init_process_group itself finds the others; each url is a store of its own."""
        here = current_rank()
        assert here is not None
        got = here if rank < 0 else rank, self.world_size if world_size < 0 else world_size
        if got != (here, self.world_size):
            raise NotSupported(
                f"simulated ranks cannot be renumbered by init_process_group\n"
                f"  got     rank {got[0]} of {got[1]} for {url}\n  wanted  rank {here} of {self.world_size}\n"
                f"  next    make groups of fewer ranks with new_group, or run on real ranks"
            )
        return c10d.PrefixStore(url, cast(Any, self.store)), *got

    def close(self) -> None:
        """End idle rank threads and wait for them: one that outlives the interpreter's end would abort the process.

        A thread that is still computing (its run made no progress), or that was abandoned, cannot be ended; it is left
        behind as a daemon.
        """
        self._job = None
        for lock in self._go:
            if lock.locked():
                lock.release()
        if self.current is None or self.current.baton.all_ended:
            abandoned = self.current.baton.abandoned if self.current is not None else set()
            for rank, thread in enumerate(self._threads):
                if rank not in abandoned:
                    thread.join()

    def _serve(self, rank: int) -> None:
        here.number, here.home = rank, self
        affinity.schedule_as_batch()
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
        here.turn = turn = Turn(rank, run.baton, run.voids, run.refused, run.stragglers)
        try:
            run.baton.start(rank)
            job(rank)
        except Aborted:
            state = deadlock.Raised(rank, "unwound after another rank's failure", "Aborted")
        except BaseException as error:
            state = ending(rank, error)
            run.adapter_error = run.adapter_error or adapter_failure(rank, error)
        finally:
            here.turn = None
            turn.end()
            run.end_rank(rank, state)
            run.baton.end(rank)


def _foreign_code(request: RunRequest) -> str:
    """Names what is not fsdpcheck's own of what ranks run: it may have told DTensor of rules of its own."""
    own = user_model(request.case)
    adapter = [] if adapters.is_builtin(request.adapter) else [request.adapter]
    installs = [name for name in request.installs if not name.startswith("fsdpcheck.")]
    return " ".join([*adapter, *([own.build] if own is not None else []), *installs])


def _stood_still(run: SimulatedRun, budget: float | None, limit: Limit) -> Failure | None:
    """Wait until all ranks have ended; what is said when they never will, or have used up what they may."""
    baton, began = run.baton, time.monotonic()
    spent = Spent(limit, time.process_time, lambda: (baton.hand_overs, *map(sleep_of, list(baton.tasks.values()))))
    while not baton.join(LOOK_SECONDS if budget is None else min(LOOK_SECONDS, budget)):
        if budget is not None and time.monotonic() - began > budget:
            return no_progress(run, f"the budget of {budget} s ran out while a rank could still run")
        if spent.look() and not run.stragglers.look() and (stuck := stuck_in_a_lock(run)) is not None:
            return stuck
        if why := spent.exceeded:
            return no_progress(run, why)
    limit.learn(spent.seconds)
    return None


@contextmanager
def _guarded_exits(left: dict[int, int]) -> Iterator[None]:
    """os._exit and os.abort on a rank's thread end that rank, not the process that simulates all of them.

    The code is noted in ``left``, for what they raise may be swallowed, by Python itself in ``__del__``.
    """
    exit_now, abort, process = os._exit, os.abort, os.getpid()

    def leave(code: int) -> None:
        rank = current_rank()
        if rank is None or os.getpid() != process:
            exit_now(code)
        raise SystemExit(left.setdefault(rank, code))

    os._exit = leave  # type: ignore[assignment]
    os.abort = lambda: leave(134)  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        os._exit, os.abort = exit_now, abort


def _second_profiler(rank: int, other: int) -> NotSupported:
    return NotSupported(
        f"simulated ranks have one profiler, for they are one process\n"
        f"  got     rank {rank} starts or stops one while that of rank {other} runs\n"
        f"  wanted  one rank that profiles, or none\n  next    profile under `if rank == 0:`, or run on real ranks"
    )


def _register_backend() -> None:
    if torch_private.BACKEND.upper() in dist.Backend.__dict__:
        return
    dist.Backend.register_backend(torch_private.BACKEND, _create_group, devices=["cpu", "cuda"])


def _create_group(store: Any, rank: int, size: int, timeout: Any) -> Meeting:
    pool: Pool = here.home
    return Meeting(rank, size, lambda: pool.current)  # type: ignore[arg-type,return-value]
