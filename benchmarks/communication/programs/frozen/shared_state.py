"""Frozen pairs: keys, counters and logs that ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from benchmarks.communication.pairs import join, pair


@pair("epoch lifecycle", 2, "order", ranks=(0,))
def acknowledged_in_an_earlier_epoch(faulty: bool) -> object:
    """Rank 0 waits for a receipt before it overwrites a key, and the receipt of the first epoch is still there."""
    rank, _ = join()
    store, seen = _get_default_store(), []
    for epoch in range(3):
        receipt = "receipt" if faulty else f"receipt/{epoch}"
        if rank == 0:
            store.set("plan", str(epoch))  # here
            store.set(f"posted/{epoch}", "1")
            store.wait([receipt])  # here
        else:
            store.wait([f"posted/{epoch}"])
            seen.append(int(store.get("plan")))  # here
            store.set(receipt, "1")
    dist.barrier()
    return seen


@pair("epoch lifecycle", 2, "order")
def result_slot_of_the_last_epoch(faulty: bool) -> object:
    """Rank 1 answers in a slot that still holds its answer of the first epoch."""
    rank, _ = join()
    store = _get_default_store()
    answers = []
    for epoch in range(2):
        slot = "answer" if faulty else f"answer/{epoch}"
        if rank == 1:
            store.set(slot, str(10 * epoch + 1))  # here
        if rank == 0:
            answers.append(int(store.get(slot)))  # here
    total = torch.tensor([float(sum(answers))])
    dist.broadcast(total, src=0)
    return total.item()


@pair("global concurrency", 2, "order")
def log_appended_by_everybody(faulty: bool) -> object:
    """Ranks append their names to one value and take its order for the order of ranks."""
    rank, size = join()
    store = _get_default_store()
    store.append("hosts" if faulty else f"hosts/{rank}", f"host{rank};")  # here
    dist.barrier()
    keys = ["hosts"] if faulty else [f"hosts/{other}" for other in range(size)]
    return "".join(store.get(key).decode() for key in keys)  # here


@pair("global concurrency", 3, "order")
def turns_dealt_by_arrival(faulty: bool) -> object:
    """Ranks draw their share of the files by a ticket: which rank has which share depends on who came first."""
    rank, _ = join()
    share = _get_default_store().add("ticket", 1) - 1 if faulty else rank  # here
    mine = torch.tensor([float(10 * share)])
    parts = [torch.empty(1) for _ in range(3)]
    dist.all_gather(parts, mine)
    return torch.cat(parts).tolist()


@pair("store", 2, "deadlock")
def lock_that_is_never_given_back(faulty: bool) -> object:
    """Whoever takes the lock first keeps it, and the other waits for its release."""
    rank, _ = join()
    store = _get_default_store()
    first = store.add("lock", 1) == 1
    if not first:
        store.wait(["released"])  # here
    elif not faulty:
        store.set("released", "1")
    dist.barrier()  # here
    return rank


@pair("store", 2, "deadlock")
def each_waits_for_the_key_of_the_other(faulty: bool) -> object:
    """Both ranks read the other's address before they publish their own."""
    rank, _ = join()
    store = _get_default_store()
    if not faulty:
        store.set(f"address/{rank}", str(rank))
    other = int(store.get(f"address/{1 - rank}"))  # here
    if faulty:
        store.set(f"address/{rank}", str(rank))
    return other
