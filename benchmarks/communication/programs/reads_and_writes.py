"""Read before wait, and write in flight: a buffer is touched while an asynchronous call has it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.communication.pairs import join, pair


@pair("read before wait", 2, "in-flight")
def loss_logged_before_it_is_reduced(faulty: bool) -> object:
    """The reduced loss is turned into a number before its reduction was waited for."""
    rank, _ = join()
    loss = torch.tensor([float(rank + 1)])
    work = dist.all_reduce(loss, async_op=True)  # here
    if not faulty:
        work.wait()
    logged = loss.item()  # here
    if faulty:
        work.wait()
    return logged


@pair("read before wait", 2, "in-flight", ranks=(1,))
def activations_used_before_they_came(faulty: bool) -> object:
    """A stage computes on the activations that it has only begun to receive."""
    rank, _ = join()
    if rank == 0:
        dist.send(torch.arange(4.0), dst=1)
        return None
    activations = torch.zeros(4)
    receiving = dist.irecv(activations, src=0)  # here
    assert receiving is not None
    if not faulty:
        receiving.wait()
    output = (activations * 2).tolist()  # here
    if faulty:
        receiving.wait()
    return output


@pair("read before wait", 2, "in-flight")
def waited_for_the_other_work(faulty: bool) -> object:
    """Of two reductions in flight the one is waited for and the other is read."""
    rank, _ = join()
    loss, hits = torch.tensor([float(rank)]), torch.tensor([float(rank + 10)])
    reducing_loss = dist.all_reduce(loss, async_op=True)
    reducing_hits = dist.all_reduce(hits, async_op=True)  # here
    (reducing_loss if faulty else reducing_hits).wait()
    accuracy = hits.item()  # here
    (reducing_hits if faulty else reducing_loss).wait()
    return accuracy


@pair("write in flight", 2, "in-flight", ranks=(0,))
def next_batch_written_over_the_one_being_sent(faulty: bool) -> object:
    """The buffer of a send is filled with the next batch before the send has ended."""
    rank, _ = join()
    batch = torch.zeros(4)
    if rank == 1:
        dist.recv(batch, src=0)
        return batch.tolist()
    batch.fill_(1.0)
    sending = dist.isend(batch, dst=1)  # here
    assert sending is not None
    if not faulty:
        sending.wait()
    batch.fill_(2.0)  # here
    if faulty:
        sending.wait()
    return None


@pair("write in flight", 2, "in-flight")
def gradient_scaled_while_it_is_reduced(faulty: bool) -> object:
    """Gradients are divided by the number of ranks before their reduction has ended."""
    rank, size = join()
    weight = nn.Parameter(torch.ones(3))
    (weight * (rank + 1)).sum().backward()
    assert weight.grad is not None
    work = dist.all_reduce(weight.grad, async_op=True)  # here
    if not faulty:
        work.wait()
    weight.grad.div_(size)  # here
    if faulty:
        work.wait()
    return weight.grad.tolist()


@pair("write in flight", 2, "in-flight")
def input_of_a_gather_cleared(faulty: bool) -> object:
    """The shard is cleared for the next step while it is still gathered."""
    rank, size = join()
    shard, full = torch.full((2,), float(rank + 1)), torch.zeros(2 * size)
    work = dist.all_gather_into_tensor(full, shard, async_op=True)  # here
    if not faulty:
        work.wait()
    shard.zero_()  # here
    if faulty:
        work.wait()
    return full.tolist()
