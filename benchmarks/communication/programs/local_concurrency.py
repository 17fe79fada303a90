"""Local concurrency: two operations of one rank use a buffer at the same time (MPI-BugBench)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("local concurrency", 2, "in-flight")
def overlapping_views_reduced_at_the_same_time(faulty: bool) -> object:
    """Two buckets of a flat gradient share an element; both are reduced before either is waited for."""
    rank, _ = join()
    flat = torch.arange(8.0) + rank
    first, second = flat[:5] if faulty else flat[:4], flat[4:]
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]  # here
    for work in works:
        work.wait()
    return flat.tolist()


@pair("local concurrency", 2, "in-flight")
def ring_shift_in_one_buffer(faulty: bool) -> object:
    """The block that is sent is also the one that is received into."""
    rank, size = join()
    block = torch.full((4,), float(rank))
    received = block if faulty else torch.empty(4)
    sending = dist.isend(block, dst=(rank + 1) % size)  # here
    receiving = dist.irecv(received, src=(rank - 1) % size)  # here
    for work in (sending, receiving):
        assert work is not None
        work.wait()
    return received.tolist()


@pair("local concurrency", 2, "in-flight")
def gradient_zeroed_while_it_is_reduced(faulty: bool) -> object:
    """The next step clears the gradients in place before the reduction of this one was waited for."""
    rank, _ = join()
    weight = torch.nn.Parameter(torch.ones(3))
    (weight * (rank + 1)).sum().backward()
    assert weight.grad is not None
    reduced = weight.grad if faulty else weight.grad.clone()
    work = dist.all_reduce(reduced, async_op=True)  # here
    torch.optim.SGD([weight], lr=1.0).zero_grad(set_to_none=False)  # here
    work.wait()
    return reduced.tolist()
