"""Checkpoint and barriers: saving, loading, and waiting for one another around it."""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.communication.pairs import join, pair


@pair("checkpoint", 2, "deadlock", ranks=(0,))
def distributed_checkpoint_saved_by_rank_zero(faulty: bool) -> object:
    """A distributed checkpoint is saved as a plain one would be: on rank 0."""
    rank, _ = join()
    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    state = {"weight": torch.ones(2)}
    if rank == 0 or not faulty:
        dcp.save(state, checkpoint_id=str(folder[0]))  # here
    dist.barrier()  # here
    if rank == 0:
        shutil.rmtree(str(folder[0]))
    return state["weight"].tolist()


@pair("checkpoint", 2, "deadlock", ranks=(0,))
def barrier_inside_the_condition_of_the_save(faulty: bool) -> object:
    """Rank 0 waits for the others after it saved, inside the condition that only it meets."""
    rank, _ = join()
    saved = []
    for step in range(1, 3):
        if step % 2 == 0 and rank == 0:
            saved.append(step)
            if faulty:
                dist.barrier()  # here
        if not faulty:
            dist.barrier()
    return saved


@pair("barriers", 2, "deadlock", ranks=(1,))
def one_barrier_more_on_one_rank(faulty: bool) -> object:
    """One rank's set-up has a barrier that the other's lacks."""
    rank, _ = join()
    phases = ["data", "model"] + (["cache"] if faulty and rank == 1 else [])
    for _ in phases:
        dist.barrier()  # here
    return rank


@pair("barriers", 2, "mismatch")
def barrier_meets_the_reduction_of_the_next_step(faulty: bool) -> object:
    """The barrier behind validation stands only where there was something to validate."""
    rank, _ = join()
    to_validate = [1.0] if rank == 0 else []
    if to_validate or not faulty:
        dist.barrier()  # here
    loss = torch.tensor([float(rank)])
    dist.all_reduce(loss)  # here
    return loss.item()
