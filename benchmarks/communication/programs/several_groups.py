"""Several groups: each group's calls agree, and still the ranks wait in a circle."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("several groups", 2, "deadlock")
def two_groups_of_the_same_ranks_in_another_order(faulty: bool) -> object:
    """One rank reduces its gradient first and its metric second, each in a group of its own."""
    rank, size = join()
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    values = [torch.tensor([float(rank)]), torch.tensor([float(rank + 10)])]
    order = [1, 0] if faulty and rank == 1 else [0, 1]
    for at in order:
        dist.all_reduce(values[at], group=groups[at])  # here
    return [value.item() for value in values]


@pair("several groups", 3, "deadlock")
def circle_of_three_pairs(faulty: bool) -> object:
    """Each rank reduces with its right neighbour before its left."""
    rank, size = join()
    ring = [dist.new_group(sorted([at, (at + 1) % size])) for at in range(size)]
    order = [rank, (rank - 1) % size]
    value = torch.tensor([float(rank + 1)])
    for at in order if faulty else sorted(order):
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=ring[at])  # here
    return value.item()


@pair("several groups", 4, "deadlock")
def rows_and_columns_in_another_order(faulty: bool) -> object:
    """On a grid two ranks reduce over rows first, two over columns."""
    rank, _ = join()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    value = torch.tensor([float(rank)])
    order = [rows[rank // 2], columns[rank % 2]]
    if faulty and rank in (0, 3):
        order.reverse()
    for group in order:
        dist.all_reduce(value, group=group)  # here
    return value.item()
