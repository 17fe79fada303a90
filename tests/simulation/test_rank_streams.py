"""Ranks that share a GPU have a stream each, and whatever one takes of another comes after what that one had queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from fsdpcheck.execution import RankResult
from fsdpcheck.simulation.streams import OnGpu, OnHost
from tests.simulation.simulator import Simulator, failure_of, keep

Clock = dict[int, int]


class Stream:
    """Knows of each stream how much of it has come before what is queued here next (vector clocks, Mattern 1989)."""

    def __init__(self, number: int) -> None:
        self.number, self.clock = number, Clock()

    def queue(self) -> int:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for number, time in event.items():
            self.clock[number] = max(time, self.clock.get(number, 0))


class PlayedCuda(threading.local):
    """The part of ``torch.cuda`` that is about streams, which each thread has its own current one of."""

    made = 0

    def __init__(self) -> None:
        self.current = Stream(-1)

    def Stream(self) -> Stream:
        PlayedCuda.made += 1
        return Stream(PlayedCuda.made)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def reduce(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(2))


def reduce_later(rank: int, size: int) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.wait()


def gather(rank: int, size: int) -> None:
    dist.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2))


def ring(rank: int, size: int) -> None:
    """All send first, which returns because the message is kept; in the end each has heard of its predecessor alone."""
    work = dist.isend(torch.ones(2), (rank + 1) % size)
    dist.recv(torch.empty(2), (rank - 1) % size)
    assert work is not None
    work.wait()


CALLS: dict[Callable[[int, int], None], Callable[[int, int], set[int]]] = {
    reduce: lambda rank, size: set(range(size)),
    reduce_later: lambda rank, size: set(range(size)),
    gather: lambda rank, size: set(range(size)),
    ring: lambda rank, size: {(rank - 1) % size},
}
"""A call -> of which ranks a rank has taken something by it."""


@pytest.fixture
def heard(simulate: Simulator) -> Iterator[Callable[[Callable[[int, int], None], OnHost, PlayedCuda], list[set[int]]]]:
    before = simulate.engine._streams

    def of_each_rank(call: Callable[[int, int], None], streams: OnHost, cuda: PlayedCuda) -> list[set[int]]:
        """By rank, after whose work on the GPU all comes that it queues after the call."""
        simulate.engine._streams = streams
        queued: dict[int, tuple[int, int]] = {}
        known: dict[int, Clock] = {}

        def body(rank: int, size: int, result: RankResult) -> None:
            queued[rank] = cuda.current_stream().number, cuda.current_stream().queue()
            call(rank, size)
            known[rank] = dict(cuda.current_stream().clock)
            keep(result, number=torch.tensor(cuda.current_stream().number))

        execution = simulate(body, 3)
        assert execution.failure is None, execution.failure
        return [
            {other for other, (number, time) in queued.items() if known[rank].get(number, 0) >= time}
            for rank in range(3)
        ]

    yield of_each_rank
    simulate.engine._streams = before


@pytest.mark.parametrize("call", CALLS)
def test_what_a_rank_takes_comes_after_what_the_other_had_queued(heard, call) -> None:  # type: ignore[no-untyped-def]
    cuda = PlayedCuda()
    for rank, after in enumerate(heard(call, OnGpu(cuda), cuda)):
        assert after >= CALLS[call](rank, 3) | {rank}


class Unordered(OnGpu):
    """Streams that nothing orders, as if no rank waited for an event."""

    def after(self, marks: object) -> None: ...


def test_without_events_nothing_orders_the_ranks(heard) -> None:  # type: ignore[no-untyped-def]
    """So that the test above can fail."""
    cuda = PlayedCuda()
    assert heard(reduce, Unordered(cuda), cuda) == [{0}, {1}, {2}]


def test_each_rank_has_a_stream_of_its_own_in_all_runs(simulate: Simulator) -> None:
    cuda, numbers = PlayedCuda(), list[list[int]]()
    before, simulate.engine._streams = simulate.engine._streams, OnGpu(cuda)
    try:
        for _ in range(2):
            found = simulate(lambda rank, size, result: keep(result, it=torch.tensor(cuda.current_stream().number)), 3)
            numbers.append([int(one.initial["it"]) for one in found.ranks])
    finally:
        simulate.engine._streams = before
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == 3
    assert -1 not in numbers[0]


def test_what_a_backend_keeps_of_a_message_comes_after_what_its_sender_had_queued(simulate: Simulator) -> None:
    """Each rank of a ring sends before it receives, which no backend without buffers gets through: the failure."""
    cuda, known, queued = PlayedCuda(), dict[int, Clock](), dict[int, tuple[int, int]]()

    def body(rank: int, size: int, result: RankResult) -> None:
        queued[rank] = cuda.current_stream().number, cuda.current_stream().queue()
        dist.send(torch.ones(2), (rank + 1) % size)
        dist.recv(torch.empty(2), (rank - 1) % size)
        known[rank] = dict(cuda.current_stream().clock)

    before, simulate.engine._streams = simulate.engine._streams, OnGpu(cuda)
    try:
        execution = simulate(body, 3)
    finally:
        simulate.engine._streams = before
    assert failure_of(execution, "unsafe")
    for rank in range(3):
        number, time = queued[(rank - 1) % 3]
        assert known[rank].get(number, 0) >= time
