"""Resource leak: communicators and threads that stay (MPI-BugBench)."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("resource leak", 2, "leak")
def new_group_every_step(faulty: bool) -> object:
    """Each step makes a group for its mean, and nobody ever ends one."""
    rank, size = join()
    loss = torch.tensor([float(rank)])
    for _ in range(4):
        group = dist.new_group(list(range(size)))  # here
        dist.all_reduce(loss, group=group)
        if not faulty:
            dist.destroy_process_group(group)
    return loss.item()


@pair("resource leak", 2, "leak")
def heartbeat_never_stopped(faulty: bool) -> object:
    """A thread that would tell that the rank lives is started for training, and never told to stop."""
    rank, _ = join()
    stop = threading.Event()
    heartbeat = threading.Thread(target=stop.wait, daemon=True)  # here
    heartbeat.start()  # here
    loss = torch.tensor([float(rank)])
    dist.all_reduce(loss)
    if not faulty:
        stop.set()
        heartbeat.join()
    return loss.item()


@pair("resource leak", 2, "leak")
def helper_makes_a_group_per_call(faulty: bool) -> object:
    """A metric makes its own group in a helper and drops the handle; it is called for every batch."""
    rank, size = join()

    def mean(value: float) -> float:
        group, total = dist.new_group(list(range(size))), torch.tensor([value])  # here
        dist.all_reduce(total, group=group)
        if not faulty:
            dist.destroy_process_group(group)
        return total.item() / size

    return [mean(float(batch + rank)) for batch in range(3)]
