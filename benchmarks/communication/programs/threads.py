"""Threads: two threads of a rank communicate, and nobody orders them."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("threads", 2, "order", "mismatch")
def metrics_thread_on_the_group_of_training(faulty: bool) -> object:
    """A thread gathers metrics in the group in which the main thread reduces gradients."""
    rank, size = join()
    group = dist.new_group(list(range(size)))
    times = torch.zeros(size)

    def gather_times() -> None:
        where = None if faulty else group
        dist.all_gather_into_tensor(times, torch.tensor([float(rank)]), group=where)  # here

    thread = threading.Thread(target=gather_times)
    thread.start()
    gradient = torch.full((3,), float(rank))
    dist.all_reduce(gradient)  # here
    thread.join()
    return [gradient.tolist(), times.tolist()]


@pair("threads", 2, "mismatch")
def thread_joined_too_late_on_one_rank(faulty: bool) -> object:
    """One rank lets its thread broadcast before the reduction, the other after it."""
    rank, _ = join()
    weights, loss = torch.full((2,), float(rank)), torch.tensor([float(rank)])
    sending = threading.Thread(target=lambda: dist.broadcast(weights, src=0))  # here
    if faulty and rank == 1:
        dist.all_reduce(loss)  # here
    sending.start()
    sending.join()
    if not faulty or rank == 0:
        dist.all_reduce(loss)  # here
    return [*weights.tolist(), loss.item()]


@pair("threads", 2, "deadlock", ranks=(0,))
def watchdog_thread_of_one_rank(faulty: bool) -> object:
    """Rank 0 waits at its end for a thread at a barrier of its own group, to which the other does not come."""
    rank, size = join()
    group = dist.new_group(list(range(size)))
    watchdog = threading.Thread(target=lambda: dist.barrier(group=group))  # here
    if rank == 0 or not faulty:
        watchdog.start()
    loss = torch.tensor([float(rank)])
    dist.all_reduce(loss)
    if rank == 0 or not faulty:
        watchdog.join()  # here
    return loss.item()
