"""Frozen pairs: groups and meshes that ranks make or use otherwise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.communication.pairs import join, pair


@pair("invalid parameter", 2, "raised", ranks=(0,))
def sends_to_itself(faulty: bool) -> object:
    """The destination was computed by a division that ends at the own rank."""
    rank, size = join()
    message = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(message, dst=(rank + 1) // size if faulty else (rank + 1) % size)  # here
    else:
        dist.recv(message, src=0)
    return message.item()


@pair("invalid parameter", 2, "raised")
def scattered_rows_do_not_divide(faulty: bool) -> object:
    """A gradient with a row too many is scattered over the ranks."""
    rank, size = join()
    gradient = torch.full((2 * size + faulty, 2), float(rank))
    shard = torch.empty(2, 2)
    dist.reduce_scatter_tensor(shard, gradient)  # here
    return shard.tolist()


@pair("group construction", 4, "mismatch", ranks=(3,))
def subgroups_of_another_size(faulty: bool) -> object:
    """One rank cuts the world into groups of another size."""
    rank, size = join()
    group, _ = dist.new_subgroups(group_size=size if faulty and rank == 3 else 2)  # here
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)  # here
    return value.item()


@pair("group construction", 2, "deadlock", ranks=(0,))
def group_made_where_it_is_first_needed(faulty: bool) -> object:
    """Rank 0 makes the group of the logger when it first logs; the other rank never logs."""
    rank, size = join()
    loss = torch.tensor([float(rank)])
    dist.all_reduce(loss)
    if rank == 0 or not faulty:
        dist.new_group(list(range(size)))  # here
    return loss.item()


@pair("several groups", 2, "unsafe")
def roots_that_leave_early(faulty: bool) -> object:
    """Two broadcasts in two groups: each rank begins with the one that it is the root of."""
    rank, size = join()
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    values = [torch.tensor([float(rank + root)]) for root in range(2)]
    order = [1, 0] if faulty and rank == 1 else [0, 1]
    for root in order:
        dist.broadcast(values[root], src=root, group=groups[root])  # here
    return [value.item() for value in values]


@pair("several groups", 3, "deadlock", ranks=(0,))
def group_forgotten_in_one_call(faulty: bool) -> object:
    """One member calls the reduction of its group on the world."""
    rank, _ = join()
    group = dist.new_group([0, 1])
    value = torch.tensor([float(rank)])
    if rank == 0 and faulty:
        dist.all_reduce(value)  # here
    elif rank < 2:
        dist.all_reduce(value, group=group)  # here
    return value.item()


@pair("device mesh", 4, "deadlock", ranks=(2,))
def dims_named_in_another_order(faulty: bool) -> object:
    """One rank has the names of the mesh's dims the other way round."""
    rank, _ = join()
    names = ("tp", "dp") if faulty and rank == 2 else ("dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    gradient = torch.tensor([float(rank)])
    dist.all_reduce(gradient, group=mesh.get_group("dp"))  # here
    return gradient.item()
