"""Device mesh: ranks that see another mesh, or another dim of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.communication.pairs import join, pair


@pair("device mesh", 4, "mismatch", ranks=(3,))
def mesh_of_another_shape(faulty: bool) -> object:
    """One rank was started with another degree of tensor parallelism."""
    rank, size = join()
    parallel = 4 if faulty and rank == 3 else 2
    mesh = init_device_mesh("cpu", (size // parallel, parallel), mesh_dim_names=("dp", "tp"))  # here
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mesh.get_group("tp"))  # here
    return value.item()


@pair("device mesh", 4, "deadlock", ranks=(3,))
def reduced_over_the_other_dim(faulty: bool) -> object:
    """One rank reduces its gradient over the tensor-parallel dim."""
    rank, _ = join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradient = torch.tensor([float(rank)])
    dist.all_reduce(gradient, group=mesh.get_group("tp" if faulty and rank == 3 else "dp"))  # here
    return gradient.item()


@pair("device mesh", 3, "mismatch", "deadlock", ranks=(2,))
def mesh_made_by_its_ranks_only(faulty: bool) -> object:
    """The rank that evaluates is not part of the mesh for training and does not make it."""
    rank, size = join()
    value = torch.tensor([float(rank)])
    trains = rank < 2
    if trains or not faulty:
        mesh = DeviceMesh("cpu", [0, 1])  # here
        if trains:
            dist.all_reduce(value, group=mesh.get_group())
    everyone = dist.new_group(list(range(size)))  # here
    dist.all_reduce(value, group=everyone)  # here
    return value.item()
