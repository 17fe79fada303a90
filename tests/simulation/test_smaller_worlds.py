"""Failures in smaller worlds: the smallest that fails alike, and no other failure taken for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import search
from fsdpcheck.simulation.decisions import Decisions
from fsdpcheck.simulation.simulate import Options, simulated


def from_three_on() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() != 2:
        dist.barrier()


def needs_four() -> None:
    dist.init_process_group("gloo")
    if dist.get_world_size() < 4:
        raise ValueError("a mesh of 2 x 2 has 4 ranks")
    if dist.get_rank() == 0:
        dist.barrier()


def raises_at_each_size_for_a_reason_of_its_own() -> None:
    dist.init_process_group("gloo")
    if dist.get_world_size() < 4:
        raise ValueError("a mesh of 2 x 2 has 4 ranks")
    raise ValueError("at W = 4 and more")


def first_come() -> None:
    """Which of three ranks or more is received first; of two there is one."""
    dist.init_process_group("gloo")
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
        return
    came = [dist.recv(torch.ones(1)) for _ in range(dist.get_world_size() - 1)]
    assert came == sorted(came)


@pytest.mark.parametrize(
    ("program", "size", "smallest"),
    [
        (from_three_on, 5, 3),
        (from_three_on, 3, None),
        (needs_four, 6, 4),
        (raises_at_each_size_for_a_reason_of_its_own, 5, 4),
        (first_come, 4, 3),
    ],
)
def test_the_smallest_world_that_fails_alike(program: Callable[[], None], size: int, smallest: int | None) -> None:
    found = search(program, size, shrink=True)
    assert found.simulation.world_size == size
    assert found.simulation.failure is not None
    assert found.worlds_tried == tuple(range(1, (smallest or size - 1) + 1))
    if smallest is None:
        assert found.smaller is None
        return
    assert found.smaller is not None
    small = found.smaller.simulation
    assert small.failure is not None
    assert (small.world_size, small.failure.kind) == (smallest, found.simulation.failure.kind)
    options = Options(show=False, decisions=Decisions(found.smaller.order))
    again = simulated(program, smallest, (), {}, options).failure
    assert again is not None
    assert small.failure.text.startswith(again.text)


def test_worlds_are_tried_in_whole_nodes_and_not_unless_that_is_asked_for() -> None:
    assert search(from_three_on, 6, shrink=True, per_node=2).worlds_tried == (2, 4)
    assert search(from_three_on, 6).worlds_tried == ()
    assert search(dist.init_process_group, 3, shrink=True).worlds_tried == (), "nothing fails"
