"""Each planted bug of the table in the docs is seen with its cause: deadlocks, mismatches, buffers in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fsdpcheck.execution import RankResult
from tests.simulation import simulator
from tests.simulation.simulator import Simulator, failure_of, keep, skips


def test_a_skipped_call_is_a_deadlock_with_who_is_missing(simulate: Simulator) -> None:
    for world_size in (2, 5):
        execution = simulate(skips, world_size)
        text = failure_of(execution, "deadlock")
        assert "all_reduce(float32[3])" in text
        assert "never called by rank" in text
        assert execution.failure is not None
        states = {state.rank: state for state in execution.failure.ranks}
        assert states[0].where.startswith(simulator.__file__)
        assert states[0].state == "blocked"
        assert all(states[rank].state == "finished" for rank in range(1, world_size))


def _op(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value) if rank else dist.broadcast(value, src=0)


def _reduce_op(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)


def _shape(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value[: 2 + rank])


def _dtype(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value if rank else value.double())


def _root(rank: int, value: torch.Tensor) -> None:
    dist.broadcast(value, src=rank)


@pytest.mark.parametrize(
    ("call", "field"),
    [(_op, "op"), (_reduce_op, "reduce op"), (_shape, "shape"), (_dtype, "dtype"), (_root, "root")],
)
def test_a_mismatch_is_one_finding_with_all_sides(
    simulate: Simulator, call: Callable[[int, torch.Tensor], None], field: str
) -> None:
    execution = simulate(lambda rank, size, result: call(rank, torch.ones(4)), 2)
    text = failure_of(execution, "mismatch")
    assert field in text.splitlines()[0]
    assert "rank 0" in text
    assert "rank 1" in text


class Layer:
    """A sharding unit of somebody's implementation: it knows its name."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn

    def gather(self) -> None:
        dist.all_gather_into_tensor(torch.empty(2 * dist.get_world_size()), torch.ones(2))


def test_equal_calls_about_different_units_are_a_mismatch(simulate: Simulator) -> None:
    first, second = Layer("blocks.0"), Layer("blocks.1")

    def body(rank: int, size: int, result: RankResult) -> None:
        for layer in (first, second) if rank != 1 else (second, first):
            layer.gather()

    text = failure_of(simulate(body, 3), "mismatch")
    assert "subject" in text.splitlines()[0]
    assert "blocks.0" in text
    assert "blocks.1" in text


def test_reading_before_the_wait_sees_poison(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        value = torch.ones(2)
        work = dist.all_reduce(value, async_op=True)
        early = value.clone()
        work.wait()
        keep(result, early=early, late=value)

    execution = simulate(body)
    assert execution.failure is None, execution.failure
    for result in execution.ranks:
        early = result.initial["early"]
        assert early[0] < -1e37
        assert bool(early[1].isnan())
        assert torch.equal(result.initial["late"], torch.full((2,), 2.0))


def test_writing_to_a_buffer_in_flight_is_seen(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        value = torch.ones(2)
        work = dist.all_reduce(value, async_op=True)
        if rank == 1:
            value.add_(1)
        work.wait()

    assert "rank 1 wrote" in failure_of(simulate(body), "in-flight")


@pytest.mark.parametrize("whole", [True, False])
def test_scaling_a_gradient_in_flight_is_seen_wherever_it_lies(simulate: Simulator, whole: bool) -> None:
    """Also through ``.data``, which counts no version, and in a view: arithmetic on NaN alone would leave NaN."""

    def body(rank: int, size: int, result: RankResult) -> None:
        gradient = torch.ones(2 if whole else 4)[:2]
        work = dist.all_reduce(gradient, async_op=True)
        gradient.data.div_(size)
        work.wait()

    assert "wrote to an input of shape [2]" in failure_of(simulate(body), "in-flight")


def test_the_memory_of_an_input_may_be_freed_in_flight(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        given, found = torch.ones(2), torch.empty(2 * size)
        work = dist.all_gather_into_tensor(found, given, async_op=True)
        given.untyped_storage().resize_(0)
        work.wait()
        keep(result, found=found)

    execution = simulate(body)
    assert execution.failure is None, execution.failure
    assert torch.equal(execution.ranks[0].initial["found"], torch.ones(4))


def test_writing_to_another_part_of_the_same_storage_is_not(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        buffer = torch.zeros(4)
        work = dist.all_reduce(buffer[:2], async_op=True)
        buffer[2:].fill_(1)
        work.wait()

    assert simulate(body).failure is None


def test_asynchronous_calls_of_two_groups_may_be_issued_in_either_order(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        groups = (one, two) if rank == 0 else (two, one)
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]
        for work in works:
            assert work is not None
            work.wait()

    assert simulate(body).failure is None


def test_blocking_calls_of_two_groups_in_opposite_order_are_a_deadlock(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (one, two) if rank == 0 else (two, one):
            dist.all_reduce(torch.ones(1), group=group)

    assert "rank 0 waits for rank 1 waits for rank 0" in failure_of(simulate(body), "deadlock")
