"""Message race: a receive from any source takes what happens to be there (MPI-BugBench)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("message race", 3, "order", ranks=(0,))
def results_in_order_of_arrival(faulty: bool) -> object:
    """The master stacks results as they arrive and takes the index for the worker."""
    rank, size = join()
    result = torch.tensor([float(rank * rank)])
    if rank:
        dist.send(result, dst=0)
        return None
    rows = []
    for worker in range(1, size):
        dist.recv(result, src=None if faulty else worker)  # here
        rows.append(result.item())
    return rows


@pair("message race", 3, "order", ranks=(0,))
def last_message_wins(faulty: bool) -> object:
    """Of two offers the master keeps the one that came last."""
    rank, size = join()
    offer = torch.tensor([10.0 * rank])
    if rank:
        dist.send(offer, dst=0)
        return None
    best = torch.zeros(1)
    for _ in range(1, size):
        dist.recv(offer)  # here
        best = offer.clone() if faulty else torch.maximum(best, offer)
    return best.item()


@pair("message race", 3, "order", "deadlock", ranks=(0,))
def any_source_before_a_named_source(faulty: bool) -> object:
    """A receive from any source may take the message that the next receive waits for."""
    rank, _ = join()
    message = torch.tensor([float(rank)])
    if rank:
        dist.send(message, dst=0)
        return None
    dist.recv(message, src=None if faulty else 2)  # here
    first = message.item()
    dist.recv(message, src=1)  # here
    return [first, message.item()]
