"""What ranks share, and who comes first: stores, files, messages from whoever is ready, threads of one rank."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from benchmarks.communication.pairs import join, pair


@pair("epoch lifecycle", 2, "order")
def barrier_of_two_keys_that_take_turns(faulty: bool) -> object:
    """A barrier on the store takes even and odd keys in turn, and nobody clears them: the third is open at once."""
    rank, size = join()
    store, there = _get_default_store(), []
    for epoch in range(3):
        key = epoch % 2 if faulty else epoch
        store.set(f"value/{epoch}/{rank}", str(rank))  # here
        store.set(f"arrived/{key}/{rank}", "1")
        store.wait([f"arrived/{key}/{other}" for other in range(size)])  # here
        there.append(store.check([f"value/{epoch}/{1 - rank}"]))  # here
    dist.barrier()
    return there


@pair("store", 2, "order", "deadlock")
def readiness_asked_for_once(faulty: bool) -> object:
    """Ranks count themselves in and should spin until all are there; who looks only once may go on alone."""
    rank, size = join()
    store = _get_default_store()
    store.add("ready", 1)
    ready = store.add("ready", 0)  # here
    while not faulty and ready < size:
        ready = store.add("ready", 0)
    loss = torch.tensor([float(rank)])
    if ready == size:
        dist.all_reduce(loss)  # here
    return loss.item()


@pair("global concurrency", 2, "order")
def lock_given_back_before_the_write(faulty: bool) -> object:
    """A ticket lock on the store guards a counter; the turn is passed on before the new count is written."""
    rank, _ = join()
    store = _get_default_store()
    if rank == 0:
        store.set("count", "0")
        store.set("turn/0", "1")
    ticket = store.add("ticket", 1) - 1
    store.wait([f"turn/{ticket}"])
    count = int(store.get("count"))  # here
    if faulty:
        store.set(f"turn/{ticket + 1}", "1")
    store.set("count", str(count + rank + 1))  # here
    if not faulty:
        store.set(f"turn/{ticket + 1}", "1")
    dist.barrier()
    return int(store.get("count"))


@pair("global concurrency", 2, "order")
def file_made_unless_it_exists(faulty: bool) -> object:
    """Each rank looks whether the index exists and appends its head if not; only O_EXCL makes one of two requests."""
    rank, _ = join()
    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    index = Path(str(folder[0])) / "index"
    if not faulty:
        try:
            os.close(os.open(index, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            index.write_text("head\n")
        except FileExistsError:
            pass
    elif not index.exists():  # here
        with index.open("a") as lines:  # here
            lines.write("head\n")
    dist.barrier()
    heads = index.read_text().count("head")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(folder[0]))
    return heads


@pair("message race", 3, "order", "unsafe", ranks=(0,))
def reply_in_the_order_of_workers(faulty: bool) -> object:
    """The server takes a question from whoever asks, and answers workers in turn: one may get another's answer."""
    rank, size = join()
    number = torch.tensor([float(rank)])
    if rank:
        dist.send(number, dst=0)
        dist.recv(number, src=0)
        return number.item()
    for worker in range(1, size):
        asked = dist.recv(number)  # here
        dist.send(number * number, dst=worker if faulty else asked)
    return None


@pair("threads", 2, "order", "mismatch", "deadlock")
def groups_made_inside_of_threads(faulty: bool) -> object:
    """Each of two threads makes its own group, so that which is made first differs by rank and run."""
    rank, size = join()
    everyone = list(range(size))
    groups = {} if faulty else {name: dist.new_group(everyone) for name in ("loss", "hits")}
    values = {"loss": torch.tensor([float(rank)]), "hits": torch.tensor([1, 2])}

    def reduce(name: str) -> None:
        group = dist.new_group(everyone) if faulty else groups[name]  # here
        dist.all_reduce(values[name], group=group)  # here

    threads = [threading.Thread(target=reduce, args=(name,)) for name in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [value.tolist() for value in values.values()]


@pair("threads", 2, "order", "in-flight", ranks=(1,))
def buffer_handed_over_by_a_receiving_thread(faulty: bool) -> object:
    """A thread receives into one buffer and hands it to the main thread, which may read the next message in it."""
    rank, _ = join()
    if rank == 0:
        for step in range(3):
            dist.send(torch.tensor([float(step)]), dst=1)
        return None
    received: queue.Queue[torch.Tensor] = queue.Queue()

    def receive() -> None:
        buffer = torch.empty(1)
        for _ in range(3):
            dist.recv(buffer, src=0)  # here
            received.put(buffer if faulty else buffer.clone())

    thread = threading.Thread(target=receive)
    thread.start()
    seen = [received.get().item() for _ in range(3)]  # here
    thread.join()
    return seen


@pair("threads", 2, "order", "mismatch")
def lock_that_orders_nothing_between_ranks(faulty: bool) -> object:
    """A lock keeps two threads of a rank apart, but which comes first is up to each rank."""
    rank, size = join()
    lock, reduced = threading.Lock(), threading.Event()
    times = torch.zeros(size)

    def gather_times() -> None:
        if not faulty:
            reduced.wait()
        with lock:
            dist.all_gather_into_tensor(times, torch.tensor([float(rank)]))  # here

    thread = threading.Thread(target=gather_times)
    thread.start()
    gradient = torch.full((3,), float(rank))
    with lock:
        dist.all_reduce(gradient)  # here
    reduced.set()
    thread.join()
    return [gradient.tolist(), times.tolist()]


@pair("checkpoint", 2, "order", "raised", ranks=(1,))
def saved_behind_the_barrier(faulty: bool) -> object:
    """Rank 0 writes the checkpoint behind the barrier that should tell the other that it is written."""
    rank, _ = join()
    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    checkpoint = Path(str(folder[0])) / "weights"
    if faulty:
        dist.barrier()
    if rank == 0:
        torch.save({"weight": torch.ones(2)}, checkpoint)
    if not faulty:
        dist.barrier()
    weight = torch.load(checkpoint)["weight"]  # here
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(folder[0]))
    return weight.tolist()
