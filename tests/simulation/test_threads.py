"""Threads that a rank starts are that rank, as they are on gloo; a thread of nobody is refused by name."""

from __future__ import annotations

import _thread
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpcheck.execution import Execution, RankResult
from tests.simulation.simulator import Simulator, failure_of, keep

SHARED = ThreadPoolExecutor(1)
"""One for all ranks, and its thread may be older than a run."""


def values(execution: Execution) -> list[list[float]]:
    """What each rank kept as ``value``."""
    assert execution.failure is None, execution.failure.text
    return [rank.initial["value"].tolist() for rank in execution.ranks]


def reduced(rank: int) -> Tensor:
    value = torch.full((2,), rank + 1.0)
    dist.all_reduce(value)
    return value


def test_a_thread_that_a_rank_joins_calls_collectives_as_the_rank(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        found: list[Tensor] = []

        def inner() -> None:
            assert dist.get_rank() == rank
            work = dist.all_reduce(one := torch.ones(2), async_op=True)
            assert work is not None
            work.wait()
            found.append(one)

        def outer() -> None:
            found.append(reduced(rank))
            dist.all_reduce(found[0], group=dist.new_group([0, 1, 2]))
            grandchild = threading.Thread(target=inner)
            grandchild.start()
            grandchild.join()

        thread = threading.Thread(target=outer)
        thread.start()
        thread.join()
        keep(result, value=torch.stack(found))

    for schedule in ("forward", "reversed"):
        execution = simulate(body, 3, schedule=schedule)  # type: ignore[arg-type]
        assert values(execution) == [[[18.0, 18.0], [3.0, 3.0]]] * 3  # type: ignore[comparison-overlap]
        assert [[call.group_name for call in rank.trace] for rank in execution.ranks] == [["0", "1", "0"]] * 3
        assert execution.voids == ("a thread that a rank started called a collective",)


def test_a_task_of_an_executor_is_the_rank_that_gave_it(simulate: Simulator) -> None:
    def own(rank: int, size: int, result: RankResult) -> None:
        with ThreadPoolExecutor() as executor:
            keep(result, value=sum(executor.map(reduced, [rank, rank])))  # type: ignore[arg-type]

    def of_a_module(rank: int, size: int, result: RankResult) -> None:
        keep(result, value=SHARED.submit(dist.get_rank).result() + torch.zeros(1))

    assert values(simulate(own)) == [[6.0, 6.0]] * 2
    for _ in range(2):
        assert values(simulate(of_a_module)) == [[0.0], [1.0]]
    assert threading.Thread.start.__module__ == "threading"


def test_a_thread_that_is_fed_by_a_queue_calls_while_the_rank_waits_for_it(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        asked: queue.Queue[int | None] = queue.Queue()
        answered: queue.Queue[Tensor] = queue.Queue()

        def serve() -> None:
            while (number := asked.get()) is not None:
                answered.put(reduced(rank * number))

        thread = threading.Thread(target=serve)
        thread.start()
        found = []
        for number in (1, 2, 3):
            asked.put(number)
            dist.barrier()
            found.append(answered.get())
        asked.put(None)
        keep(result, value=torch.stack(found)[:, 0])

    assert values(simulate(body)) == [[3.0, 4.0, 5.0]] * 2


def test_a_checkpoint_that_is_saved_behind_the_step_holds_every_rank(simulate: Simulator, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as saving

    def body(rank: int, size: int, result: RankResult) -> None:
        mesh = init_device_mesh("cpu", (size,))
        its_own = dist.new_group(backend="gloo")  # or its calls would race with those of the training, on gloo too
        waited = saving.async_save(
            {"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])},
            checkpoint_id=tmp_path / "waited",
            process_group=its_own,
        )
        dist.all_reduce(torch.ones(1))  # the training goes on
        waited.result()  # type: ignore[union-attr]
        loaded = {"x": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
        saving.load(loaded, checkpoint_id=tmp_path / "waited")
        keep(result, value=loaded["x"].full_tensor())

    assert values(simulate(body)) == [list(map(float, range(8)))] * 2


def test_a_rank_has_ended_when_its_threads_have(simulate: Simulator) -> None:
    found: dict[int, Tensor] = {}

    def body(rank: int, size: int, result: RankResult) -> None:
        threading.Thread(target=lambda: found.update({rank: reduced(rank)})).start()

    def gives(rank: int, size: int, result: RankResult) -> None:
        SHARED.submit(lambda: found.update({rank + 2: torch.tensor([float(dist.get_rank())])}))

    for last in (body, gives):
        execution = simulate(last)
        assert execution.failure is None, execution.failure.text
    assert {rank: value.tolist() for rank, value in found.items()} == {0: [3, 3], 1: [3, 3], 2: [0], 3: [1]}


def test_a_thread_that_the_others_miss_is_a_deadlock_at_its_place(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        def lonely() -> None:
            if rank == 0:
                dist.barrier()

        thread = threading.Thread(target=lonely)
        thread.start()
        thread.join()

    execution = simulate(body)
    text = failure_of(execution, "deadlock")
    assert "rank 0: in barrier() #0 on ranks [0, 1], waiting for rank 1" in text
    assert execution.failure is not None
    assert any("in lonely" in line for line in execution.failure.ranks[0].stack)
    assert simulate(lambda rank, size, result: dist.barrier()).failure is None


def test_what_simulated_ranks_do_not_offer_fails_the_run_in_a_thread_too(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        thread = threading.Thread(target=dist.group.WORLD.merge_remote_group, args=(None,))
        thread.start()
        thread.join()

    assert "merge_remote_group is not offered" in failure_of(simulate(body), "adapter")


def test_a_thread_that_no_rank_started_is_refused_by_name(simulate: Simulator) -> None:
    told: list[str] = []

    def body(rank: int, size: int, result: RankResult) -> None:
        done = _thread.allocate_lock()
        done.acquire()

        def nobody() -> None:
            try:
                dist.is_initialized()
            except Exception as error:
                told.append(str(error))
            done.release()

        _thread.start_new_thread(nobody, ())
        done.acquire()

    assert simulate(body).failure is None
    assert len(told) == 2
    assert all("used in a thread that is no rank" in text and "got     thread 'Dummy-" in text for text in told)
