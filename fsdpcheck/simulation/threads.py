"""Rank threads: one pool a world size, W persistent threads in one isolated world, waiting for runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdpcheck.compat import (
    blocking_private,
    cuda_private,
    defaults_private,
    dtensor_private,
    dynamo_private,
    groups_private,
    observers_private,
)
from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.execution import Failure, deadlock
from fsdpcheck.execution.outcomes import adapter_failure, ending
from fsdpcheck.processes.limit import LOOK_SECONDS, Limit, Spent, sleep_of
from fsdpcheck.simulation import affinity
from fsdpcheck.simulation.current_rank import current_rank, here, require_rank
from fsdpcheck.simulation.observation import ObservedMeeting
from fsdpcheck.simulation.run import SimulatedRun, no_progress
from fsdpcheck.simulation.scheduler import Aborted, where
from fsdpcheck.simulation.shared_locks import stuck_in_a_lock
from fsdpcheck.simulation.store import SimulatedStore
from fsdpcheck.simulation.turn import SIDE_BY_SIDE, Turn
from fsdpcheck.simulation.turns import in_turn, threads_of_ranks
from fsdpcheck.simulation.waits import starts_threads_of_the_harness


class Pool:
    """W rank threads inside one isolated world, waiting for runs. After a failure it must be closed, never reused."""

    def __init__(self, world_size: int, *, pinned: bool = True, told: int = 0) -> None:
        """``pinned``: all on one core, and whatever they start. ``told``: how many they say there are; 0 for W."""
        self.world_size, self._pinned, self._told = world_size, pinned, told or world_size
        self.store = SimulatedStore(lambda: self.current)
        self.current: SimulatedRun | None = None
        self._meshes = dtensor_private.Meshes(current_rank)
        self._world = groups_private.thread_local_world(lambda: self.current and require_rank())
        self._job: Any = None
        self._made = Counter[int]()
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
        program: Callable[[int], None],
        budget: float | None,
        limit: Limit,
    ) -> SimulatedRun:
        """Run to the end or a failure. Raises only what the caller's own thread does (KeyboardInterrupt)."""
        self.current = run
        self.store.clear()
        self._made = Counter[int]()
        world = run.world

        def job(rank: int) -> None:
            if world.joined and not dist.is_initialized():  # its first run, or the last one has destroyed its groups
                dist.init_process_group(
                    groups_private.BACKEND, rank=rank, world_size=self.world_size, store=cast(Any, self.store)
                )
            groups = groups_private.groups_of_this_thread()
            self._meshes.begin(rank, world.foreign_code)
            with world.around():
                program(rank)
            assert here.turn is not None
            here.turn.finish()
            groups_private.forget_groups_but(groups)
            self._meshes.end(rank)

        self._job = job
        if self._pinned:
            affinity.gather_on_one_core(self._threads)
        with (
            groups_private.isolated_threads(self._world),
            cuda_private.guard_that_outlives_threads(),
            self._meshes.in_place(),
            groups_private.groups_of_ranks(partial(_rank, run), self._meet, self._making, _makes_a_group),
            blocking_private.stores_of_ranks(current_rank, self.store.at),
            blocking_private.gloo_of_ranks(current_rank, self._gloo),
            blocking_private.rpc_of_ranks(_refuse_rpc),
            defaults_private.no_group_at_import(current_rank),
            dynamo_private.compiled_without("fsdpcheck.simulation", "fsdpcheck.execution", "fsdpcheck.compat"),
            observers_private.profilers_of_ranks(starts_threads_of_the_harness),
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
            run.failure = run.failure or stood
            run.baton.disown()
            return run
        run.finish()
        return run

    def _meet(self, url: str, rank: int, world_size: int) -> tuple[Any, int, int]:
        """Where a rank that calls init_process_group itself finds the others; each url is a store of its own."""
        got = require_rank() if rank < 0 else rank, self._told if world_size < 0 else world_size
        self._require_numbers(*got, url)
        return c10d.PrefixStore(url, cast(Any, self.store)), *got

    def _gloo(self, rank: int, size: int) -> ObservedMeeting:
        """The next group that a rank makes without torch.distributed; all ranks are in it."""
        self._require_numbers(rank, size, "ProcessGroupGloo")
        self._made[rank] += 1
        group = ObservedMeeting(rank, size, lambda: self.current)  # type: ignore[arg-type,return-value]
        group.stand_for(f"ProcessGroupGloo {self._made[rank]}", tuple(range(size)))
        return group

    def _require_numbers(self, rank: int, world_size: int, where: str) -> None:
        here = require_rank()
        if (rank, world_size) != (here, self._told):
            raise NotSupported(
                f"simulated ranks cannot be renumbered by init_process_group\n"
                f"  got     rank {rank} of {world_size} for {where}\n  wanted  rank {here} of {self._told}\n"
                f"  next    make groups of fewer ranks with new_group, or run on real ranks"
            )

    def _making(self, name: str, ranks: tuple[int, ...], backend: str, alive: frozenset[str]) -> None:
        """A rank makes a group; of a program that is watched, all ranks must make the same."""
        run, rank = self.current, require_rank()
        assert run is not None
        if not run.watches:
            return
        waits = dist.Backend.GLOO in backend
        if (wrong := run.groups_made.make(rank, name, ranks, where(sys._getframe(2)), alive, waits=waits)) is not None:
            run.fail(wrong)
            run.baton.block(rank)

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
        dtensor_private.forget_meshes()
        del keep_on_this_thread

    def _one(self, rank: int) -> None:
        run, job = self.current, self._job
        assert run is not None
        state: deadlock.State = deadlock.Finished(rank)
        here.turn = turn = Turn(
            rank, run.baton, run.voids, run.refused, run.stragglers, run.world.around, run.decisions
        )
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
            for daemon in turn.daemons:
                run.daemons.setdefault(daemon, set()).add(rank)
            for executor in turn.executors.left if isinstance(state, deadlock.Finished) else ():
                run.executors.setdefault(executor, set()).add(rank)
            if turn.side_by_side and run.decisions is not None:
                run.voids.add(SIDE_BY_SIDE)
            turn.end()
            run.end_rank(rank, state)
            run.baton.end(rank)


_makes_a_group = partial(in_turn, shared=lambda *_, **__: ("new_group",))
"""What makes a subgroup, as one call: torch numbers groups as a rank makes them, whichever of its threads does."""


def _refuse_rpc() -> None:
    if current_rank() is not None:
        raise NotSupported(
            explain(
                "simulated ranks have no torch.distributed.rpc",
                got=f"init_rpc on rank {current_rank()}",
                wanted="messages and collectives of torch.distributed",
                then="run it on real ranks",
            )
        )


def _rank(run: SimulatedRun) -> int | None:
    """That which calls. Raises NotSupported in a forked child."""
    run.children.require_none()
    return current_rank()


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


def _register_backend() -> None:
    if groups_private.BACKEND.upper() in dist.Backend.__dict__:
        return
    dist.Backend.register_backend(groups_private.BACKEND, _create_group, devices=groups_private.devices())


def _create_group(store: Any, rank: int, size: int, timeout: Any) -> ObservedMeeting:
    pool: Pool = here.home
    return ObservedMeeting(rank, size, lambda: pool.current)  # type: ignore[arg-type,return-value]
