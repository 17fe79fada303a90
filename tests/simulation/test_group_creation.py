"""Groups that ranks make: all must make the same, and those that pile up are noted."""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from fsdpcheck import Simulation
from fsdpcheck.report import colour, simulation
from fsdpcheck.simulation.search import Search
from fsdpcheck.simulation.simulate import simulate


def run(program: Callable[[int], object], world_size: int = 4) -> Simulation:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(dist.get_rank())

    return simulate(whole, world_size, show=False)


def of_other_ranks(rank: int) -> None:
    dist.new_group([0, 1] if rank != 2 else [0, 2])


def of_its_own_alone(rank: int) -> None:
    dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1])


def in_another_order(rank: int) -> None:
    for ranks in ([0, 1], [2, 3]) if rank != 3 else ([2, 3], [0, 1]):
        dist.new_group(ranks)


def of_one_rank_or_of_two(rank: int) -> None:
    dist.new_group([0] if rank == 0 else [1, 2])


def another_mesh(rank: int) -> None:
    init_device_mesh("cpu", (2, 2) if rank != 3 else (4, 1))


def with_neighbours(rank: int, order: Callable[[int], object]) -> None:
    """Groups that only their members make, each of two neighbours in a ring."""
    for at in sorted([rank, (rank - 1) % 4], key=order):
        dist.new_group(sorted([at, (at + 1) % 4]), use_local_synchronization=True)


def test_groups_that_members_make_in_a_ring_are_a_deadlock_on_gloo_with_their_lines() -> None:
    assert run(lambda rank: with_neighbours(rank, lambda at: at % 2)).failure is None
    failure = run(lambda rank: with_neighbours(rank, lambda at: at != rank)).failure
    assert failure is not None
    assert failure.kind == "deadlock"
    assert "ranks make groups in orders that are a ring" in failure.text
    line = with_neighbours.__code__.co_firstlineno + 3
    assert [(state.rank, state.where) for state in failure.ranks] == [(rank, f"{__file__}:{line}") for rank in range(4)]


@pytest.mark.parametrize(
    "program", [of_other_ranks, of_its_own_alone, in_another_order, of_one_rank_or_of_two, another_mesh]
)
def test_ranks_that_make_other_groups_are_a_mismatch_with_both_lines(program: Callable[[int], object]) -> None:
    failure = run(program).failure
    assert failure is not None
    assert failure.kind == "mismatch", failure.text
    assert "ranks disagree about group" in failure.text
    assert [state.where.rpartition(":")[0] for state in failure.ranks] == [__file__, __file__]


def test_groups_that_all_make_or_that_members_agree_on_are_right() -> None:
    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        local = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
        total = torch.ones(1)
        for group in (groups[rank // 2], local, mesh.get_group("inner"), mesh.get_group("outer")):
            dist.all_reduce(total, group=group)
        return total.item()

    done = run(program).check()
    assert (done.returned, done.notes) == ((16.0,) * 4, ())


def test_groups_of_one_rank_each_may_share_a_name() -> None:
    def program(rank: int) -> tuple[int, int]:
        outer, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        alone, all_alone = dist.new_subgroups(group_size=1, group=outer)
        dist.barrier(alone)
        dist.barrier()
        return dist.get_process_group_ranks(alone)[0], len(all_alone)

    assert run(program).check().returned == ((0, 2), (1, 2), (2, 2), (3, 2))


def test_groups_made_again_and_again_and_daemons_left_are_noted() -> None:
    def program(rank: int, ends: bool) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, daemon=True)
        thread.start()
        for _ in range(4):
            group = dist.new_group([0, 1])
            dist.barrier(group)
            if ends:
                dist.destroy_process_group(group)
        if ends:
            stop.set()
            thread.join()

    threads, groups = run(lambda rank: program(rank, False), 2).check().notes
    assert threads.startswith(f"leak: ranks 0, 1 came to their end with a thread (Event.wait, started at {__file__}:")
    assert groups.startswith(f"leak: ranks 0, 1 made 4 groups of ranks [0, 1] at {__file__}:")
    assert run(lambda rank: program(rank, True), 2).check().notes == ()


def test_threads_of_torch_that_end_with_the_process_are_no_leak() -> None:
    """A loader with workers, of which not everything was taken, feeds their queue still."""
    kept = []

    def program(rank: int) -> None:
        loader = DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork")
        kept.append(iter(loader))
        next(kept[-1])
        dist.barrier()

    assert run(program, 2).check().notes == ()
    assert any(thread.name == "QueueFeederThread" for thread in threading.enumerate())
    for iterator in kept:
        iterator._shutdown_workers()


def test_a_group_that_a_member_never_makes_is_a_hang_on_gloo() -> None:
    def program(rank: int) -> None:
        if rank != 1:
            dist.new_group([0, 1])

    failure = run(program, 3).failure
    assert failure is not None
    assert failure.kind == "deadlock"
    assert failure.text.endswith("missing: rank 1")

    alone = simulate(
        lambda: dist.init_process_group("gloo") if os.environ["RANK"] == "0" else None, 2, show=False
    ).failure
    assert alone is not None
    assert "rank 0: init_process_group(), at " in alone.text


def test_what_a_run_that_failed_leaves_is_no_leak() -> None:
    def program(rank: int) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        warnings.filters.append(("ignore", None, UserWarning, None, 0))
        if rank == 0:
            dist.barrier()

    done = run(program, 2)
    assert done.failure is not None
    assert done.notes == ()
    report = simulation.ending(Search(done, 1, False), colour.painter(io.StringIO()))
    assert "deadlock" in report
    assert "it was put back" not in report
