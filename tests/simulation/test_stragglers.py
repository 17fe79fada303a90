"""Threads and tasks that go on when the programs of ranks have returned: waited for, or left alone and told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fsdpcheck.execution import RankResult
from fsdpcheck.processes.limit import Limit
from fsdpcheck.simulation.stragglers import Stragglers
from tests.simulation.simulator import Simulator, failure_of

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set when the test is over, so that no thread outlives it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a run has been looked at a few times while all its ranks were asleep."""
    event, times, look = threading.Event(), [0], Stragglers.look

    def counted(stragglers: Stragglers) -> bool:
        times[0] += 1
        if times[0] == 4:
            event.set()
        return look(stragglers)

    monkeypatch.setattr(Stragglers, "look", counted)
    return event


def barrier(rank: int, size: int, result: RankResult) -> None:
    dist.barrier()


def asleep(event: threading.Event) -> None:
    """Wait with a time-out, so that nobody can prove that it never ends."""
    event.wait(3600)


@pytest.mark.parametrize("endless", [threading.Event.wait, asleep])
def test_what_never_ends_is_left_alone_and_told(
    endless: Callable[[threading.Event], object], simulate: Simulator, over: threading.Event
) -> None:
    def starts(rank: int, size: int, result: RankResult) -> None:
        if rank != 1:
            threading.Thread(target=endless, args=(over,)).start()
            threading.Thread(target=asleep, args=(over,), daemon=True).start()
        dist.barrier()

    def gives(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            ThreadPoolExecutor(1).submit(endless, over)
        dist.barrier()

    for body, ranks, what in ((starts, "ranks 0 and 2", "a thread ("), (gives, "rank 1", "a task of an executor (")):
        execution = simulate(body, 3)
        assert execution.failure is None, execution.failure.text
        (told,) = execution.left
        assert told.startswith(f"{ranks} left {what}{endless.__qualname__}, ")
        assert f" at {__file__}:" in told
        assert told.endswith(") running")
    assert simulate(barrier, 3).left == ()


def test_a_thread_that_sleeps_while_another_rank_needs_it_is_waited_for(
    simulate: Simulator, looked: threading.Event
) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            threading.Thread(target=lambda: (asleep(looked), dist.barrier())).start()
        else:
            dist.barrier()

    for schedule in ("forward", "reversed"):
        execution = simulate(body, schedule=schedule)  # type: ignore[arg-type]
        assert (execution.failure, execution.left) == (None, ())
        assert [len(rank.trace) for rank in execution.ranks] == [1, 1]


def test_threads_that_call_collectives_are_waited_for_however_long_they_sleep(
    simulate: Simulator, looked: threading.Event
) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        def beats() -> None:
            dist.barrier()
            asleep(looked)
            dist.barrier()

        threading.Thread(target=beats).start()

    execution = simulate(body)
    assert (execution.failure, execution.left) == (None, ())
    assert [len(rank.trace) for rank in execution.ranks] == [2, 2]


def test_one_that_calls_when_it_was_left_is_unwound_and_nobody_is_blamed(
    simulate: Simulator, over: threading.Event
) -> None:
    ended = []

    def late() -> None:
        asleep(over)
        try:
            dist.barrier()
        finally:
            ended.append(threading.current_thread())

    def body(rank: int, size: int, result: RankResult) -> None:
        threading.Thread(target=late).start()

    execution = simulate(body)
    assert execution.failure is None
    assert execution.left[0].startswith("every rank left a thread (")
    started = [thread for thread in threading.enumerate() if getattr(thread, "_target", None) is late]
    over.set()
    for thread in started:
        thread.join()
    assert len(ended) == len(started) == 2
    assert simulate(barrier).failure is None


def test_a_thread_that_never_ends_hides_no_deadlock(simulate: Simulator, over: threading.Event) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        if rank == 0:
            threading.Thread(target=over.wait).start()
        else:
            dist.all_reduce(torch.ones(1))

    assert "was never called by rank 0" in failure_of(simulate(body), "deadlock")


def test_one_that_computes_for_ever_is_named_when_the_limit_is_reached(
    simulate: Simulator, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate.engine, "_limit", Limit(0.01))

    def spins() -> None:
        while not over.is_set():
            pass

    text = failure_of(simulate(lambda rank, size, result: threading.Thread(target=spins).start()), "no progress")
    assert "rank 0: its program has returned, and it waits for a thread (" in text
    assert f"spins, started at {__file__}:" in text
