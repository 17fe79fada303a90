"""Messages: halos, stages of a pipeline, tags and peers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("buffering hazard", 2, "unsafe")
def sends_waited_for_at_once(faulty: bool) -> object:
    """A send that is waited for before the receive is posted is a blocking send, on both ranks."""
    rank, _ = join()
    other = 1 - rank
    mine, halo = torch.full((2,), float(rank)), torch.empty(2)
    sending = dist.isend(mine, dst=other)
    assert sending is not None
    if faulty:
        sending.wait()  # here
    receiving = dist.irecv(halo, src=other)
    assert receiving is not None
    receiving.wait()
    if not faulty:
        sending.wait()
    return halo.tolist()


@pair("point-to-point order", 3, "deadlock")
def receives_waited_for_before_the_sends(faulty: bool) -> object:
    """A ring of non-blocking calls, begun in another order by each rank: the receive is waited for too early."""
    rank, size = join()
    left, right = (rank - 1) % size, (rank + 1) % size
    mine, came = torch.tensor([float(rank)]), torch.empty(1)
    works = []
    if faulty or rank % 2:
        works.append(dist.irecv(came, src=left))
        if faulty:
            works.pop().wait()  # here
        works.append(dist.isend(mine, dst=right))
    else:
        works.append(dist.isend(mine, dst=right))
        works.append(dist.irecv(came, src=left))
    for work in reversed(works):
        work.wait()
    return came.item()


@pair("tags and peers", 4, "deadlock", ranks=(1,))
def place_in_the_group_for_a_peer(faulty: bool) -> object:
    """The peer of a message in a group is named by its place in the group, where its rank in the world is meant."""
    rank, _ = join()
    group = dist.new_group([1, 2, 3])
    message = torch.tensor([float(rank)])
    if rank == 1 and faulty:
        dist.isend(message, dst=2, group=group).wait()  # here
    elif rank == 1:
        dist.isend(message, group_dst=2, group=group).wait()
    elif rank == 3:
        dist.recv(message, src=1, group=group)  # here
    return message.item()


@pair("pipeline", 2, "mismatch")
def mask_and_activations_swapped(faulty: bool) -> object:
    """A stage sends activations and then their mask, which the next takes in the other order, without tags."""
    rank, _ = join()
    activations, mask = torch.full((3,), 1.5), torch.tensor([1, 0, 1], dtype=torch.int32)
    if rank == 0:
        for tensor in (activations, mask):
            dist.send(tensor, dst=1)  # here
        return None
    activations, mask = torch.empty(3), torch.empty(3, dtype=torch.int32)
    for tensor in (mask, activations) if faulty else (activations, mask):
        dist.recv(tensor, src=0)  # here
    return (activations * mask).tolist()


@pair("pipeline", 3, "deadlock")
def first_stage_takes_its_gradient_before_the_second_micro_batch(faulty: bool) -> object:
    """The first stage runs one forward, one backward; the last needs two micro-batches before it begins to go back."""
    rank, size = join()
    micro_batches, values = 2, []
    in_turn = faulty and rank == 0
    moved = torch.empty(1)

    def forward(at: int) -> None:
        if rank == 0:
            moved.fill_(float(at + 1))
        else:
            dist.recv(moved, src=rank - 1)  # here
        if rank < size - 1:
            dist.isend(moved.clone(), dst=rank + 1).wait()

    def backward() -> None:
        if rank < size - 1:
            dist.recv(moved, src=rank + 1)  # here
        values.append(moved.item())
        if rank:
            dist.isend(moved.clone(), dst=rank - 1).wait()

    for at in range(micro_batches):
        forward(at)
        if in_turn:
            backward()
    if not in_turn:
        for _ in range(micro_batches):
            backward()
    return values
