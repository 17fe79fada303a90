"""Rank-0 branch: a call that looks local is a collective, and only one rank makes it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.communication.pairs import join, pair


@pair("rank-0 branch", 2, "deadlock", ranks=(0,))
def metric_computed_by_rank_zero(faulty: bool) -> object:
    """Computing a metric reduces it, and only the rank that prints it computes it."""
    rank, _ = join()

    class Accuracy:
        def __init__(self, hits: float) -> None:
            self.hits = torch.tensor([hits])

        def compute(self) -> float:
            dist.all_reduce(self.hits)  # here
            return self.hits.item()

    accuracy = Accuracy(float(rank + 1))
    if faulty:
        return accuracy.compute() if rank == 0 else None  # here
    total = accuracy.compute()
    return total if rank == 0 else None


@pair("rank-0 branch", 2, "unsafe", ranks=(0,))
def validation_on_rank_zero_with_buffers(faulty: bool) -> object:
    """Rank 0 alone runs a model whose running statistics it broadcasts before each forward."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False)))
    nn.init.ones_(model.module[0].weight)
    rows = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    model(rows)
    if rank == 0:
        score = (model if faulty else model.module)(rows).sum().item()  # here
        return round(score, 3) + 0.0
    return None


@pair("rank-0 branch", 2, "deadlock", ranks=(0,))
def barrier_on_one_side_of_a_download(faulty: bool) -> object:
    """The others wait until rank 0 has downloaded; rank 0 forgets to tell them."""
    rank, _ = join()
    files = ["shard"]
    if rank != 0:
        dist.barrier()  # here
    if rank == 0:
        files = [f"{name}.bin" for name in files]
        if not faulty:
            dist.barrier()
    return files
