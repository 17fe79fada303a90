"""Uneven data: ranks have batches of another number, and each batch is a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.communication.pairs import join, pair


@pair("uneven data", 2, "deadlock", ranks=(1,))
def loop_over_the_own_batches(faulty: bool) -> object:
    """Files are dealt out in turn, five to two ranks; each file ends with a reduction."""
    rank, size = join()
    files = list(range(5))
    mine = files[rank::size]
    total = torch.zeros(1)
    steps = len(mine) if faulty else -(-len(files) // size)
    for step in range(steps):
        loss = torch.tensor([float(mine[step]) if step < len(mine) else 0.0])
        dist.all_reduce(loss)  # here
        total += loss
    return total.item()


@pair("uneven data", 2, "deadlock", ranks=(1,))
def data_parallel_without_join(faulty: bool) -> object:
    """Each rank trains on all the batches that it has, and one has a batch less."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)

    def train() -> None:
        for _ in range(3 - rank):
            model(torch.ones(1, 1)).sum().backward()  # here

    if faulty:
        train()
    else:
        with model.join():
            train()
    return model.module.weight.item() == 1.0


@pair("uneven data", 2, "deadlock", ranks=(1,))
def loader_without_a_sampler(faulty: bool) -> object:
    """The data set is cut by hand: the last rank's part makes a batch less."""
    rank, size = join()
    samples = torch.arange(10.0)
    mine = samples[:6] if rank == 0 else samples[6:]
    if not faulty:
        mine = samples[rank::size]
    seen = 0.0
    for (batch,) in DataLoader(TensorDataset(mine), batch_size=3, drop_last=True):
        count = torch.tensor([float(len(batch))])
        dist.all_reduce(count)  # here
        seen += count.item()
    return seen
