"""Data parallel: DistributedDataParallel reduces in the backward what it believes every rank has."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.communication.pairs import join, pair


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
        for head in self.heads:
            nn.init.ones_(head.weight)

    def forward(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        outputs: torch.Tensor = self.heads[0](rows)
        return outputs + self.heads[1](rows) if both else outputs


@pair("data parallel", 2, "deadlock", ranks=(1,))
def head_that_one_rank_does_not_use(faulty: bool) -> object:
    """The batch of one rank has no sample of the second task: its gradient is never ready."""
    rank, _ = join()
    model = DistributedDataParallel(_TwoHeads(), find_unused_parameters=not faulty)
    model(torch.ones(1, 2), both=rank == 0).sum().backward()  # here
    return [head.weight.grad.tolist() for head in model.module.heads if head.weight.grad is not None]


@pair("data parallel", 2, "deadlock", ranks=(1,))
def no_sync_on_one_rank(faulty: bool) -> object:
    """One rank counts another number of micro-batches and does not synchronise in the last."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    micro_batches, accumulated = 2, 3 if faulty and rank == 1 else 2
    for micro_batch in range(micro_batches):
        last = micro_batch == accumulated - 1
        with nullcontext() if last else model.no_sync():
            model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return model.module.weight.grad.tolist()


@pair("data parallel", 2, "raised")
def another_model_on_one_rank(faulty: bool) -> object:
    """One rank has a configuration with a bias."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Linear(2, 1, bias=faulty and rank == 1))  # here
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad.tolist()


@pair("data parallel", 2, "mismatch")
def one_rank_compresses_its_gradients(faulty: bool) -> object:
    """A hook that sends gradients in half precision is registered on one rank only."""
    rank, _ = join()
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    if rank == 0 or not faulty:
        model.register_comm_hook(None, fp16_compress_hook)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return model.module.weight.grad.tolist()
