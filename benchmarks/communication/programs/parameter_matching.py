"""Parameter matching: ranks meet in one operation whose arguments disagree (MPI-BugBench)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("parameter matching", 2, "mismatch")
def all_to_all_splits_disagree(faulty: bool) -> object:
    """Tokens are exchanged by counts that each rank took from its own router, and never exchanged themselves."""
    rank, size = join()
    sent = [1, 3] if rank == 0 else [2, 2]
    received = list(sent)
    if not faulty:
        counts = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor(sent))
        received = counts.tolist()
    tokens = torch.arange(4.0) + 10 * rank
    routed = torch.empty(sum(received))
    dist.all_to_all_single(routed, tokens, received, sent)  # here
    return routed.tolist()


@pair("parameter matching", 2, "mismatch")
def received_into_a_smaller_buffer(faulty: bool) -> object:
    """The receiver expects the batch without its last row."""
    rank, _ = join()
    if rank == 0:
        dist.send(torch.arange(12.0).view(4, 3), dst=1)  # here
        return None
    batch = torch.empty(3 if faulty else 4, 3)
    dist.recv(batch, src=0)  # here
    return batch.tolist()


@pair("parameter matching", 3, "mismatch")
def scattered_chunks_of_another_size(faulty: bool) -> object:
    """The root deals out its batch by a ceiling, the others expect a floor."""
    rank, size = join()
    rows = 8
    share = -(-rows // size) if rank == 0 or not faulty else rows // size
    mine = torch.empty(share)
    batch = torch.nn.functional.pad(torch.arange(float(rows)), (0, share * size - rows))
    dist.scatter(mine, list(batch.chunk(size)) if rank == 0 else None, src=0)  # here
    return mine.tolist()
