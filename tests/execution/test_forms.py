"""Every form of a call that ProcessGroup has is the one with lists and options."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdpcheck import simulate

FORMS: tuple[Callable[[Any, int], list[Any]], ...] = (
    lambda group, rank: [group.allreduce(value := torch.ones(1)), value],
    lambda group, rank: [group.allreduce(value := torch.full((1,), 2.0), dist.ReduceOp.MAX), value],
    lambda group, rank: [group.allreduce([value := torch.full((1,), 3.0)], op=dist.ReduceOp.MIN), value],
    lambda group, rank: [group.allreduce([value := torch.ones(1)]), value],
    lambda group, rank: [group.broadcast(value := torch.full((1,), 4.0 + rank), 1, timedelta(seconds=1)), value],
    lambda group, rank: [group.broadcast(value := torch.full((1,), 5.0 + rank), root=1), value],
    lambda group, rank: [group.reduce(value := torch.ones(1), root=rank * 0, op=dist.ReduceOp.SUM), value],
    lambda group, rank: [
        group.allgather(values := [torch.empty(1), torch.empty(1)], torch.full((1,), 1.0 + rank)),
        *values,
    ],
    lambda group, rank: [
        group.gather(values := [torch.empty(1), torch.empty(1)] if rank else [], torch.full((1,), 3.0 + rank), 1),
        *values,
    ],
    lambda group, rank: [
        group.scatter(value := torch.empty(1), [torch.full((1,), 1.0), torch.full((1,), 2.0)] if rank else [], root=1),
        value,
    ],
    lambda group, rank: [group.reduce_scatter(value := torch.empty(1), [torch.ones(1), torch.full((1,), 2.0)]), value],
    lambda group, rank: [group.barrier()],
    lambda group, rank: [group.barrier(timeout=timedelta(seconds=1))],
)
WANTED = (
    ([[2.0], [2.0], [3.0], [2.0], [5.0], [6.0], [2.0], [1.0, 2.0], [], [1.0], [2.0], [], []]),
    ([[2.0], [2.0], [3.0], [2.0], [5.0], [6.0], [None], [1.0, 2.0], [3.0, 4.0], [2.0], [4.0], [], []]),
)


def test_every_form_computes_on_groups_that_torch_makes_and_that_ranks_make_themselves() -> None:
    def program() -> list[list[list[float | None]]]:
        dist.init_process_group("gloo")
        own = dist.ProcessGroupGloo(dist.HashStore(), dist.get_rank(), 2)
        return [computed(group, dist.get_rank()) for group in (dist.group.WORLD, own)]

    def computed(group: object, rank: int) -> list[list[float | None]]:
        found = []
        for form in FORMS:
            work, *values = form(group, rank)
            work.wait()
            found.append([None if value.isnan() else value.item() for value in values])
        return found

    done = simulate(program, 2).check()
    assert done.returned == tuple([wanted] * 2 for wanted in WANTED)
    assert {call.group_name for call in done.traces[0]} == {"0", "ProcessGroupGloo 1"}
