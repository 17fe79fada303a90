"""Order of sends and receives, tags and peers: messages that nobody sends or nobody takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("point-to-point order", 2, "deadlock")
def both_receive_before_they_send(faulty: bool) -> object:
    """Two ranks exchange halos, and both wait for the other's first."""
    rank, _ = join()
    other = 1 - rank
    mine, halo = torch.full((2,), float(rank)), torch.empty(2)
    if faulty or rank == 1:
        dist.recv(halo, src=other)  # here
        dist.send(mine, dst=other)
    else:
        dist.send(mine, dst=other)
        dist.recv(halo, src=other)
    return halo.tolist()


@pair("point-to-point order", 3, "deadlock")
def ring_of_receives(faulty: bool) -> object:
    """A running sum goes round a ring, and nobody begins."""
    rank, size = join()
    total = torch.zeros(1)
    if faulty or rank != 0:
        dist.recv(total, src=(rank - 1) % size)  # here
    total += rank
    if faulty or rank != size - 1:
        dist.send(total, dst=(rank + 1) % size)
    return total.item()


@pair("point-to-point order", 2, "deadlock")
def one_message_more_expected_than_sent(faulty: bool) -> object:
    """The receiver counts the end mark, the sender does not send one."""
    rank, _ = join()
    chunks = 3
    if rank == 0:
        for chunk in range(chunks):
            dist.send(torch.tensor([float(chunk)]), dst=1)
        return None
    received, chunk_received = [], torch.empty(1)
    for _ in range(chunks + faulty):
        dist.recv(chunk_received, src=0)  # here
        received.append(chunk_received.item())
    return received


@pair("tags and peers", 2, "deadlock")
def tag_of_the_next_step(faulty: bool) -> object:
    """The receiver has counted its step before it makes the tag."""
    rank, _ = join()
    message = torch.tensor([float(rank)])
    for step in range(2):
        if rank == 0:
            dist.send(message, dst=1, tag=step)  # here
        else:
            dist.recv(message, src=0, tag=step + 1 if faulty else step)  # here
    return message.item()


@pair("tags and peers", 2, "deadlock", ranks=(0,))
def batch_without_the_send(faulty: bool) -> object:
    """Rank 0 lists only its receive in the batch, rank 1 lists both."""
    rank, _ = join()
    other = 1 - rank
    mine, theirs = torch.tensor([float(rank)]), torch.empty(1)
    operations = [dist.P2POp(dist.irecv, theirs, other)]
    if rank == 1 or not faulty:
        operations.append(dist.P2POp(dist.isend, mine, other))
    for work in dist.batch_isend_irecv(operations):  # here
        work.wait()  # here
    return theirs.item()


@pair("tags and peers", 3, "deadlock", ranks=(1,))
def neighbour_on_the_wrong_side(faulty: bool) -> object:
    """One rank of a ring has its left and right the wrong way round."""
    rank, size = join()
    step = -1 if faulty and rank == 1 else 1
    mine, received = torch.tensor([float(rank)]), torch.empty(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + step) % size),
            dist.P2POp(dist.irecv, received, (rank - step) % size),
        ]
    )
    for work in works:
        work.wait()  # here
    return received.item()
