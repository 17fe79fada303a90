"""Sharded parameters: every touch of a sharded module or DTensor may be a collective."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.communication.pairs import join, pair


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
    for weight in model.parameters():
        nn.init.ones_(weight)
    return model


@pair("sharded parameters", 2, "deadlock", ranks=(0,))
def forward_of_rank_zero_for_a_summary(faulty: bool) -> object:
    """Rank 0 runs the sharded model once more, to print the shape of its output."""
    rank, size = join()
    model, mesh = _model(), init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    output = model(torch.ones(1, 2))
    if faulty and rank == 0:
        output = model(torch.ones(1, 2))  # here
    return output.tolist()


@pair("sharded parameters", 2, "deadlock", ranks=(0,))
def full_tensor_on_rank_zero(faulty: bool) -> object:
    """Rank 0 prints a weight, whose shards it has to gather for that."""
    rank, size = join()
    weight = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (size,)), [Shard(0)])
    if rank == 0 or not faulty:
        full = weight.full_tensor()  # here
    return full.tolist() if rank == 0 else None


@pair("sharded parameters", 2, "mismatch")
def wrapped_in_other_units(faulty: bool) -> object:
    """One rank shards each layer by itself, the other the whole model at once."""
    rank, size = join()
    model, mesh = _model(), init_device_mesh("cpu", (size,))
    if rank == 0 or not faulty:
        for layer in model:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model(torch.ones(1, 2)).tolist()  # here
