"""Group construction: new_group is itself a collective of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("group construction", 3, "mismatch", "deadlock", ranks=(2,))
def group_made_by_its_members_only(faulty: bool) -> object:
    """Only the members of a group make it, where every rank has to; the next group does not come about."""
    rank, size = join()
    members = [0, 1]
    value = torch.tensor([float(rank)])
    if rank in members or not faulty:
        pairwise = dist.new_group(members)  # here
    if rank in members:
        dist.all_reduce(value, group=pairwise)
    everyone = dist.new_group(list(range(size)))  # here
    dist.all_reduce(value, group=everyone)  # here
    return value.item()


@pair("group construction", 3, "mismatch", ranks=(2,))
def members_disagree_about_the_group(faulty: bool) -> object:
    """One rank counts the members of the group differently."""
    rank, size = join()
    members = [1, 2] if faulty and rank == 2 else list(range(size))
    group = dist.new_group(members)  # here
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)  # here
    return value.item()


@pair("group construction", 4, "mismatch")
def two_groups_made_in_another_order(faulty: bool) -> object:
    """Each half of the world makes its own group first and the other's second."""
    rank, _ = join()
    halves = [[0, 1], [2, 3]]
    if faulty and rank >= 2:
        halves.reverse()
    made = {tuple(half): dist.new_group(half) for half in halves}  # here
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=made[(0, 1) if rank < 2 else (2, 3)])  # here
    return value.item()
