"""Call skipped: one rank does not make a call that the others wait in."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("call skipped", 2, "deadlock", ranks=(0,))
def condition_cut_short(faulty: bool) -> object:
    """``and`` does not evaluate the reduction where the local flag is already false."""
    rank, _ = join()

    def all_ranks(flag: bool) -> bool:
        votes = torch.tensor([float(flag)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)  # here
        return bool(votes.item())

    finite = rank == 1
    return finite and all_ranks(finite) if faulty else all_ranks(finite)  # here


@pair("call skipped", 2, "deadlock", ranks=(1,))
def empty_batch_skipped(faulty: bool) -> object:
    """A rank whose batch is empty goes on to the next without the reduction."""
    rank, _ = join()
    total = 0.0
    for batch in ([1.0, 2.0], [3.0] if rank == 0 else []):
        if faulty and not batch:
            continue
        loss = torch.tensor(batch).sum()
        dist.all_reduce(loss)  # here
        total += loss.item()
    return total


@pair("call skipped", 3, "deadlock", ranks=(2,))
def every_rank_but_the_last_gathers(faulty: bool) -> object:
    """A range that stops one too early leaves the last rank out of the gather."""
    rank, size = join()
    mine = torch.tensor([float(rank)])
    parts = [torch.empty(1) for _ in range(size)]
    if rank in range(size - 1 if faulty else size):
        dist.all_gather(parts, mine)  # here
        return torch.cat(parts).tolist()
    return None
