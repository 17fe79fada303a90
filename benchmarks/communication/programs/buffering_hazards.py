"""Buffering hazard: blocking sends that only a buffer lets pass (the tenth class of the MPI Bugs Initiative)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("buffering hazard", 2, "unsafe")
def both_send_before_they_receive(faulty: bool) -> object:
    """Two ranks exchange halos, and both send first."""
    rank, _ = join()
    other = 1 - rank
    mine, halo = torch.full((2,), float(rank)), torch.empty(2)
    if faulty or rank == 0:
        dist.send(mine, dst=other)  # here
        dist.recv(halo, src=other)
    else:
        dist.recv(halo, src=other)
        dist.send(mine, dst=other)
    return halo.tolist()


@pair("buffering hazard", 3, "unsafe")
def ring_of_sends(faulty: bool) -> object:
    """All ranks of a ring send to the next before they receive from the last."""
    rank, size = join()
    mine, received = torch.tensor([float(rank)]), torch.empty(1)
    if not faulty and rank == 0:
        dist.recv(received, src=size - 1)
        dist.send(mine, dst=1)
        return received.item()
    dist.send(mine, dst=(rank + 1) % size)  # here
    dist.recv(received, src=(rank - 1) % size)
    return received.item()


@pair("buffering hazard", 2, "unsafe")
def objects_sent_head_to_head(faulty: bool) -> object:
    """Both ranks send their list of samples before they take the other's."""
    rank, _ = join()
    other = 1 - rank
    mine: list[object] = [{"rank": rank}]
    theirs: list[object] = [None]
    if faulty or rank == 0:
        dist.send_object_list(mine, dst=other)  # here
        dist.recv_object_list(theirs, src=other)
    else:
        dist.recv_object_list(theirs, src=other)
        dist.send_object_list(mine, dst=other)
    return theirs
