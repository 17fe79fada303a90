"""Executors that programs of ranks make: one that was given a task and is never shut down is noted, and no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fsdpcheck import Simulation, simulate


def simulated(kind: str) -> Simulation:
    def program() -> int:
        dist.init_process_group("gloo")
        pool = ThreadPoolExecutor(1)
        found = pool.submit(dist.get_rank).result() if kind != "unused" else 0
        if kind == "shut down":
            pool.shutdown()
        if kind == "with":
            with pool:
                pass
        if kind == "shut down without waiting":
            pool.shutdown(wait=False)
        return found

    return simulate(program, 2, show=False)


def test_one_that_is_never_shut_down_is_noted_with_the_line_that_made_it() -> None:
    done = simulated("forgotten")
    assert done.failure is None
    (note,) = done.notes
    assert note.startswith(f"leak: ranks 0, 1 never shut down the executor of threads made at {__file__}:"), note


@pytest.mark.parametrize("kind", ["unused", "shut down", "with", "shut down without waiting"])
def test_one_that_is_shut_down_or_has_no_threads_is_not(kind: str) -> None:
    assert simulated(kind).notes == ()
