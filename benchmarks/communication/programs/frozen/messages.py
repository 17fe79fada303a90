"""Frozen pairs: messages that cross, race, or find nobody."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.communication.pairs import join, pair


@pair("buffering hazard", 2, "unsafe")
def messages_taken_in_the_other_order(faulty: bool) -> object:
    """Inputs are sent before labels, and labels are taken before inputs."""
    rank, _ = join()
    inputs, labels = torch.full((2,), 1.0 - rank), torch.full((1,), 2.0 - rank)
    if rank == 0:
        dist.send(inputs, dst=1, tag=1)  # here
        dist.send(labels, dst=1, tag=2)
    elif faulty:
        dist.recv(labels, src=0, tag=2)  # here
        dist.recv(inputs, src=0, tag=1)
    else:
        dist.recv(inputs, src=0, tag=1)
        dist.recv(labels, src=0, tag=2)
    return [*inputs.tolist(), labels.item()]


@pair("message race", 4, "order", ranks=(0,))
def rounded_sum_in_order_of_arrival(faulty: bool) -> object:
    """Numbers that cancel are added as they arrive: what is lost to rounding depends on who comes first."""
    rank, size = join()
    number = torch.tensor([[0.0, 1e8, 1.0, -1e8][rank]])
    if rank:
        dist.send(number, dst=0)
        return None
    total = torch.zeros(1)
    for worker in range(1, size):
        dist.recv(number, src=None if faulty else worker)  # here
        total += number
    return total.item()


@pair("point-to-point order", 3, "deadlock", ranks=(2,))
def worker_that_expects_two_tasks(faulty: bool) -> object:
    """The master gives each worker one task before it takes results; one worker answers after its second."""
    rank, size = join()
    task = torch.empty(1)
    if rank == 0:
        for worker in range(1, size):
            dist.send(torch.tensor([float(worker)]), dst=worker)
        results = []
        for worker in range(1, size):
            dist.recv(task, src=worker)  # here
            results.append(task.item())
        return results
    for _ in range(2 if faulty and rank == 2 else 1):
        dist.recv(task, src=0)  # here
    dist.send(task * task, dst=0)
    return None


@pair("tags and peers", 2, "deadlock")
def own_rank_for_a_tag(faulty: bool) -> object:
    """Both sides tag with their own rank, where the receiver has to take the sender's."""
    rank, _ = join()
    message = torch.tensor([float(rank)])
    if rank == 1:
        dist.send(message, dst=0, tag=rank)  # here
    else:
        dist.recv(message, src=1, tag=rank if faulty else 1)  # here
    return message.item()


@pair("tags and peers", 3, "deadlock", ranks=(0,))
def exchange_that_lists_one_neighbour_twice(faulty: bool) -> object:
    """In its batch of halos one rank has its right neighbour twice and its left never."""
    rank, size = join()
    left, right = (rank - 1) % size, (rank + 1) % size
    if faulty and rank == 0:
        left = right
    mine, halos = torch.tensor([float(rank)]), [torch.empty(1), torch.empty(1)]
    operations = [dist.P2POp(dist.isend, mine, to) for to in (left, right)]
    operations += [dist.P2POp(dist.irecv, halos[0], left), dist.P2POp(dist.irecv, halos[1], right)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()  # here
    return [halo.item() for halo in halos]


@pair("pipeline", 2, "unsafe")
def gradients_sent_back_from_the_last(faulty: bool) -> object:
    """The last stage sends gradients from the last micro-batch to the first, the first stage takes them in order."""
    rank, _ = join()
    order = [2, 1, 0] if faulty and rank == 1 else [0, 1, 2]
    gradients = []
    for micro_batch in order:
        gradient = torch.full((2,), float(micro_batch))
        if rank == 1:
            dist.send(gradient, dst=0, tag=micro_batch)  # here
        else:
            dist.recv(gradient, src=1, tag=micro_batch)  # here
            gradients.append(gradient.sum().item())
    return gradients


@pair("pipeline", 2, "deadlock")
def schedules_of_other_lengths(faulty: bool) -> object:
    """Two ranks make a GPipe schedule of their stages with another number of micro-batches."""
    rank, size = join()
    layer = nn.Linear(2, 2, bias=False)
    nn.init.eye_(layer.weight)
    micro_batches = 4 if faulty and rank == 1 else 2
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=micro_batches)
    rows = torch.arange(8.0).view(4, 2)
    output = schedule.step(rows) if rank == 0 else schedule.step()  # here
    return output.tolist() if rank == 1 else None
