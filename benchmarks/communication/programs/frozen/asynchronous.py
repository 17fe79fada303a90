"""Frozen pairs: works that nobody waits for, buffers that are in use, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.communication.pairs import join, pair


@pair("resource leak", 2, "leak")
def pool_of_threads_never_shut_down(faulty: bool) -> object:
    """A loader's pool of threads is made for a job and forgotten; its threads wait for more."""
    rank, _ = join()
    pool = ThreadPoolExecutor(max_workers=1)  # here
    rows = pool.submit(lambda: torch.tensor([float(rank)])).result()  # here
    if not faulty:
        pool.shutdown()
    dist.all_reduce(rows)
    return rows.item()


@pair("request lifecycle", 2, "never waited")
def prefetch_behind_the_last_layer(faulty: bool) -> object:
    """Each layer prefetches the next one's weights, and the last layer's prefetch is for nobody."""
    rank, size = join()
    shards = [torch.full((1,), float(10 * layer + rank)) for layer in range(3)]
    sums, weights, ahead = [], torch.empty(size), torch.empty(size)
    work = dist.all_gather_into_tensor(weights, shards[0], async_op=True)
    for layer in range(3):
        work.wait()
        if layer + 1 < 3 or faulty:
            ahead = torch.empty(size)
            work = dist.all_gather_into_tensor(ahead, shards[(layer + 1) % 3], async_op=True)  # here
        sums.append(weights.sum().item())
        weights = ahead
    return sums


@pair("request lifecycle", 2, "never waited")
def asynchronous_barrier_without_wait(faulty: bool) -> object:
    """A barrier that nobody waits for holds nobody back."""
    rank, _ = join()
    work = dist.barrier(async_op=True)  # here
    if not faulty and work is not None:
        work.wait()
    return rank


@pair("local concurrency", 3, "in-flight", ranks=(0,))
def two_receives_into_one_buffer(faulty: bool) -> object:
    """Results of two workers are received into the same buffer at the same time."""
    rank, _ = join()
    if rank:
        dist.send(torch.full((2,), float(rank)), dst=0)
        return None
    buffers = [torch.empty(2), torch.empty(2)]
    into = [buffers[0], buffers[0] if faulty else buffers[1]]
    works = [dist.irecv(into[0], src=1), dist.irecv(into[1], src=2)]  # here
    for work in works:
        assert work is not None
        work.wait()
    return [buffer.tolist() for buffer in into]


@pair("local concurrency", 2, "in-flight")
def storage_freed_while_it_is_gathered(faulty: bool) -> object:
    """A shard is resharded, its storage resized to nothing, while a gather still reads it."""
    rank, size = join()
    shard = torch.full((4,), float(rank))
    full = torch.empty(4 * size)
    work = dist.all_gather_into_tensor(full, shard, async_op=True)  # here
    if not faulty:
        work.wait()
    shard.untyped_storage().resize_(0)  # here
    if faulty:
        work.wait()
    return full.tolist()


@pair("read before wait", 2, "in-flight")
def parts_joined_before_they_are_gathered(faulty: bool) -> object:
    """What is gathered is concatenated before the wait, and the copy keeps what was there."""
    rank, size = join()
    parts = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(parts, torch.full((2,), float(rank + 1)), async_op=True)  # here
    if not faulty:
        work.wait()
    whole = torch.cat(parts)  # here
    if faulty:
        work.wait()
    return whole.tolist()


@pair("read before wait", 2, "in-flight")
def step_with_a_gradient_in_flight(faulty: bool) -> object:
    """The optimizer steps between the reduction of the gradient and its wait."""
    rank, _ = join()
    weight = nn.Parameter(torch.ones(2))
    (weight * (rank + 1)).sum().backward()
    work = dist.all_reduce(weight.grad, async_op=True)  # here
    if not faulty:
        work.wait()
    torch.optim.SGD([weight], lr=0.5).step()  # here
    if faulty:
        work.wait()
    return weight.tolist()


@pair("write in flight", 2, "in-flight", ranks=(0,))
def average_updated_while_it_is_broadcast(faulty: bool) -> object:
    """The root goes on to average its weights in place while they are still broadcast."""
    rank, _ = join()
    average = torch.full((3,), 4.0 if rank == 0 else 0.0)
    work = dist.broadcast(average, src=0, async_op=True)  # here
    if rank == 0 and not faulty:
        work.wait()
    if rank == 0:
        average.lerp_(torch.zeros(3), 0.5)  # here
    if rank == 1 or faulty:
        work.wait()
    return average.tolist()


@pair("threads", 2, "order")
def two_threads_take_from_one_source(faulty: bool) -> object:
    """Two threads of a rank receive from the same rank with the same tag: either may get either message."""
    rank, _ = join()
    if rank == 0:
        for tag in (1, 2):
            dist.send(torch.tensor([float(tag)]), dst=1, tag=0 if faulty else tag)
        dist.barrier()
        return None
    inputs, labels = torch.empty(1), torch.empty(1)
    threads = [
        threading.Thread(target=lambda: dist.recv(inputs, src=0, tag=0 if faulty else 1)),  # here
        threading.Thread(target=lambda: dist.recv(labels, src=0, tag=0 if faulty else 2)),  # here
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return [inputs.item(), labels.item()]


@pair("shutdown", 2, "never waited")
def destroyed_over_a_work_in_flight(faulty: bool) -> object:
    """The group is taken down while the last metric is still reduced."""
    rank, _ = join()
    metric = torch.tensor([float(rank)])
    work = dist.all_reduce(metric, async_op=True)  # here
    if not faulty:
        work.wait()
    dist.destroy_process_group()  # here
    return rank
