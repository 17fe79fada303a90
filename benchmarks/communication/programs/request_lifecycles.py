"""Request lifecycle: works that are issued and never waited for (MPI-BugBench)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("request lifecycle", 2, "never waited", ranks=(0,))
def isend_without_wait(faulty: bool) -> object:
    """The sender drops the handle of its send."""
    rank, _ = join()
    activations = torch.arange(4.0)
    if rank == 0:
        sending = dist.isend(activations, dst=1)  # here
        if not faulty and sending is not None:
            sending.wait()
    else:
        activations.zero_()
        dist.recv(activations, src=0)
    return activations.tolist() if rank == 1 else None


@pair("request lifecycle", 2, "never waited", ranks=(0,))
def only_the_last_handle_is_waited_for(faulty: bool) -> object:
    """The loop overwrites the handle, so that only the last send is waited for."""
    rank, _ = join()
    chunks = torch.arange(6.0).view(3, 2)
    received = torch.empty(2)
    total = torch.zeros(2)
    if rank == 1:
        for _ in range(3):
            dist.recv(received, src=0)
            total += received
        return total.tolist()
    handles = []
    for chunk in chunks:
        handle = dist.isend(chunk, dst=1)  # here
        handles.append(handle)
    for handle in handles[-1:] if faulty else handles:
        assert handle is not None
        handle.wait()
    return None


@pair("request lifecycle", 2, "never waited", ranks=(1,))
def only_rank_zero_waits(faulty: bool) -> object:
    """The reduced count is printed on rank 0, and only rank 0 waits for it."""
    rank, _ = join()
    count = torch.tensor([rank + 1])
    work = dist.all_reduce(count, async_op=True)  # here
    if rank == 0 or not faulty:
        work.wait()
    return count.item() if rank == 0 else None
