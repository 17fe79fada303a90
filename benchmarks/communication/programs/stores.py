"""Store: keys that nobody sets, counts that nobody reaches, questions asked too early."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from benchmarks.communication.pairs import join, pair


@pair("store", 2, "deadlock", ranks=(1,))
def key_with_another_spelling(faulty: bool) -> object:
    """Rank 0 publishes under one name, rank 1 waits for another."""
    rank, _ = join()
    store = _get_default_store()
    if rank == 0:
        store.set("vocab_size", "32")
        return 32
    return int(store.get("vocabulary_size" if faulty else "vocab_size"))  # here


@pair("store", 2, "deadlock")
def count_that_is_never_reached(faulty: bool) -> object:
    """The last of those who arrive opens the gate, but the count has a rank too many."""
    rank, size = join()
    store = _get_default_store()
    if store.add("arrived", 1) == size + faulty:
        store.set("gate", "open")
    store.wait(["gate"])  # here
    return rank


@pair("store", 2, "order", "deadlock", ranks=(1,))
def stop_flag_that_is_only_looked_at(faulty: bool) -> object:
    """Rank 0 sets a flag to stop; rank 1 looks whether it is there, and may make a reduction more or less."""
    rank, _ = join()
    store = _get_default_store()
    total = torch.zeros(1)
    for step in range(3):
        if rank == 0 and step == 1:
            store.set("stop", "1")
        if not faulty:
            dist.barrier()
        if store.check(["stop"]):  # here
            break
        loss = torch.ones(1)
        dist.all_reduce(loss)  # here
        total += loss
    return total.item()
