"""Global concurrency: ranks write and read what they share without an order between them (MPI-BugBench)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from benchmarks.communication.pairs import join, pair


@pair("global concurrency", 2, "order")
def counter_read_and_written_back(faulty: bool) -> object:
    """Each rank reads a counter of the store, adds its samples, and writes it back: an update may be lost."""
    rank, _ = join()
    store = _get_default_store()
    if rank == 0:
        store.set("samples", "0")
    dist.barrier()
    if faulty:
        samples = int(store.get("samples"))  # here
        store.set("samples", str(samples + rank + 1))  # here
    else:
        store.add("samples", rank + 1)
    dist.barrier()
    return int(store.get("samples"))


@pair("global concurrency", 2, "order", ranks=(1,))
def file_read_without_a_barrier(faulty: bool) -> object:
    """Rank 0 writes a vocabulary, rank 1 reads it and may be too early."""
    rank, _ = join()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    vocabulary = Path(folder[0]) / "vocabulary"
    if rank == 0:
        vocabulary.write_text("a b c")  # here
    if not faulty:
        dist.barrier()
    words = vocabulary.read_text() if vocabulary.exists() else ""  # here
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return words


@pair("global concurrency", 2, "order")
def last_writer_decides(faulty: bool) -> object:
    """Every rank writes its own best score under one key; who wrote last decides."""
    rank, size = join()
    store = _get_default_store()
    store.set("best" if faulty else f"best/{rank}", str(10 * rank))  # here
    dist.barrier()
    if faulty:
        return int(store.get("best"))  # here
    return max(int(store.get(f"best/{other}")) for other in range(size))
