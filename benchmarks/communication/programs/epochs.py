"""Epoch lifecycle: what belongs to one round of an exchange is taken for another's (MPI-BugBench's windows)."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from benchmarks.communication.pairs import join, pair


@pair("epoch lifecycle", 2, "order", ranks=(1,))
def key_used_again_in_the_next_epoch(faulty: bool) -> object:
    """Rank 0 publishes a learning rate each epoch under one key; rank 1 may read an older or a newer one."""
    rank, _ = join()
    store = _get_default_store()
    seen = []
    for epoch in range(3):
        key = "lr" if faulty else f"lr/{epoch}"
        if rank == 0:
            store.set(key, str(epoch))  # here
        else:
            seen.append(int(store.get(key)))  # here
    dist.barrier()
    return seen


@pair("epoch lifecycle", 2, "order")
def barrier_on_keys_without_a_generation(faulty: bool) -> object:
    """A barrier whose key stays set holds nobody in the second epoch: a rank may read the sum of half the world."""
    rank, size = join()
    store = _get_default_store()
    sums = []
    for epoch in range(2):
        store.add(f"sum/{epoch}", rank + 1)
        generation = 0 if faulty else epoch
        if store.add(f"arrived/{generation}", 1) == size:
            store.set(f"go/{generation}", "1")
        store.wait([f"go/{generation}"])  # here
        sums.append(store.add(f"sum/{epoch}", 0))  # here
    dist.barrier()
    return sums


@pair("epoch lifecycle", 2, "order", "deadlock", ranks=(0,))
def key_deleted_before_it_was_read(faulty: bool) -> object:
    """Rank 0 clears the key of an epoch at its end; a slower rank then waits for it for ever."""
    rank, _ = join()
    store = _get_default_store()
    if rank == 0:
        store.set("plan", "17")
        if not faulty:
            dist.barrier()
        store.delete_key("plan")  # here
        return 17
    plan = int(store.get("plan"))  # here
    if not faulty:
        dist.barrier()
    return plan
