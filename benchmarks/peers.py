"""The same rank program on other engines: torch's threaded group, mp.spawn, and ranks that exchange nothing."""

from __future__ import annotations

import os
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fsdpcheck.compat import dtensor_private
from fsdpcheck.engines._simulated.in_process import Program
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.execution.assembly import assemble
from fsdpcheck.program import rank_program


class ThreadedGroupEngine:
    """torch.testing's threaded process group, used as its MultiThreadedTestCase does: fresh threads every case."""

    name = kind = "threaded group"

    def __init__(self, program: Program = rank_program) -> None:
        from torch.testing._internal.distributed import multi_threaded_pg

        self._threaded, self._program = multi_threaded_pg, program

    def run(self, request: RunRequest) -> Execution:
        """Run every rank on a thread of its own; raises what the first rank raised."""
        world_size = request.case.world_size
        results = [RankResult(rank) for rank in range(world_size)]
        errors: list[BaseException] = []
        self._threaded._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        store = dist.HashStore()
        threads = [
            threading.Thread(target=self._rank, args=(request, rank, store, results, errors))
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        self._threaded._uninstall_threaded_pg()
        if errors:
            raise errors[0]
        return assemble(Execution(self.name, request, results))

    def _rank(
        self, request: RunRequest, rank: int, store: dist.Store, results: list[RankResult], errors: list[BaseException]
    ) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=request.case.world_size, store=store)
        try:
            self._program(request, rank, torch.device("cpu"), results[rank])
            results[rank].observations.append(("backend", "end", 0, dist.get_backend()))
        except BaseException as error:
            errors.append(error)
            self._threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    def close(self) -> None:
        """Nothing outlives a run."""


class FreeEngine:
    """Ranks one after the other, on groups whose calls do nothing: what ranks cost on an engine that costs nothing.

    Values are wrong: a rank alone gathers memory that nobody wrote. Only what it costs may be read.
    """

    name = kind = "ranks that exchange nothing"

    def __init__(self, program: Program = rank_program) -> None:
        from torch.testing._internal.distributed import fake_pg

        self._store, self._program, self._rank = fake_pg.FakeStore, program, 0
        self._meshes = dtensor_private.Meshes(lambda: self._rank)  # what DTensor knows is kept, as ours keeps it

    def run(self, request: RunRequest) -> Execution:
        """Run each rank to its end, then the next."""
        results = [RankResult(rank) for rank in range(request.case.world_size)]
        with self._meshes.in_place():
            for rank, result in enumerate(results):
                self._alone(request, rank, result)
        return Execution(self.name, request, results)

    def _alone(self, request: RunRequest, rank: int, result: RankResult) -> None:
        self._rank = rank
        self._meshes.begin(rank, "")
        dist.init_process_group("fake", rank=rank, world_size=request.case.world_size, store=self._store())
        try:
            self._program(request, rank, torch.device("cpu"), result)
        finally:
            dist.destroy_process_group()
            self._meshes.end(rank)

    def close(self) -> None:
        """Nothing outlives a run."""


def _spawned(rank: int, request: RunRequest, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(path, "store"), request.case.world_size)
    dist.init_process_group("gloo", rank=rank, world_size=request.case.world_size, store=store)
    result = RankResult(rank)
    rank_program(request, rank, torch.device("cpu"), result)
    torch.save(result, os.path.join(path, f"rank{rank}"))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort a process that ends now and then, when all is done


class SpawnEngine:
    """A new world of gloo processes for every case, as most multi-process tests are written."""

    name = kind = "mp.spawn gloo"

    def run(self, request: RunRequest) -> Execution:
        """Start W processes, run, and read their results back."""
        with tempfile.TemporaryDirectory() as path:
            mp.spawn(_spawned, (request, path), nprocs=request.case.world_size)
            results = [
                torch.load(os.path.join(path, f"rank{rank}"), weights_only=False)
                for rank in range(request.case.world_size)
            ]
        return assemble(Execution(self.name, request, results))

    def close(self) -> None:
        """Nothing outlives a run."""
