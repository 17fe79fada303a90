"""Call ordering: ranks make the same calls in another order (MPI-BugBench)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("call ordering", 2, "mismatch")
def broadcast_and_all_reduce_swapped(faulty: bool) -> object:
    """Rank 1 reduces its loss before it takes the weights, rank 0 after it gave them."""
    rank, _ = join()
    weights, loss = torch.full((4,), float(rank)), torch.tensor([float(rank)])
    if faulty and rank == 1:
        dist.all_reduce(loss)  # here
        dist.broadcast(weights, src=0)
    else:
        dist.broadcast(weights, src=0)  # here
        dist.all_reduce(loss)
    return [*weights.tolist(), loss.item()]


@pair("call ordering", 3, "mismatch", ranks=(2,))
def barrier_before_the_reduction_on_one_rank(faulty: bool) -> object:
    """The last rank waits at a barrier before it reduces; the others reduce first."""
    rank, size = join()
    hits = torch.tensor([float(rank)])
    if faulty and rank == size - 1:
        dist.barrier()  # here
    dist.all_reduce(hits)  # here
    if not faulty or rank != size - 1:
        dist.barrier()
    return hits.item()


@pair("call ordering", 2, "unsafe")
def send_across_a_barrier(faulty: bool) -> object:
    """A message is sent before a barrier and received behind it."""
    rank, _ = join()
    message = torch.arange(3.0) if rank == 0 else torch.zeros(3)
    if rank == 0:
        dist.send(message, dst=1)  # here
        dist.barrier()
        return None
    if not faulty:
        dist.recv(message, src=0)
    dist.barrier()  # here
    if faulty:
        dist.recv(message, src=0)
    return message.tolist()
