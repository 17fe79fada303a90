"""Invalid parameter: an argument that no rank could have meant (MPI-BugBench)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("invalid parameter", 2, "raised")
def broadcast_from_rank_outside_the_world(faulty: bool) -> object:
    """The root is the number of ranks, one more than the last rank."""
    _, size = join()
    weight = torch.arange(4.0)
    dist.broadcast(weight, src=size if faulty else size - 1)  # here
    return weight.tolist()


@pair("invalid parameter", 2, "raised")
def gathered_list_one_too_short(faulty: bool) -> object:
    """The list for what is gathered leaves no room for the own tensor."""
    rank, size = join()
    mine = torch.full((3,), float(rank))
    parts = [torch.empty(3) for _ in range(size - 1 if faulty else size)]
    dist.all_gather(parts, mine)  # here
    return torch.stack(parts).tolist()


@pair("invalid parameter", 3, "raised", ranks=(2,))
def ring_without_modulo(faulty: bool) -> object:
    """The last rank sends to a rank that is not there, and the first waits for it."""
    rank, size = join()
    received = torch.empty(1)
    following = rank + 1 if faulty else (rank + 1) % size
    sending = dist.isend(torch.tensor([float(rank)]), dst=following)  # here
    dist.recv(received, src=(rank - 1) % size)  # here
    assert sending is not None
    sending.wait()
    return received.item()
