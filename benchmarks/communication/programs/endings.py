"""Early exit, exception, and shutdown: a rank that is no longer there when others need it."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("early exit", 2, "deadlock", ranks=(1,))
def returns_when_it_has_no_data(faulty: bool) -> object:
    """A rank without samples returns from training before the others' reduction."""
    rank, _ = join()
    samples = [1.0, 2.0] if rank == 0 else []
    if faulty and not samples:
        return 0.0
    total = torch.tensor([sum(samples, 0.0)])
    dist.all_reduce(total)  # here
    return total.item()


@pair("early exit", 2, "exited", "deadlock", ranks=(1,))
def leaves_by_sys_exit(faulty: bool) -> object:
    """A rank that has reached its target ends its script; the other goes on."""
    rank, _ = join()
    accuracy = torch.tensor([0.5 + 0.5 * rank])
    reached = accuracy.item() >= 1.0
    if not faulty:
        dist.all_reduce(accuracy, op=dist.ReduceOp.MIN)
        reached = accuracy.item() >= 1.0
    if reached:
        sys.exit(0)  # here
    dist.all_reduce(accuracy)  # here
    return accuracy.item()


@pair("early exit", 3, "lost", "exited", ranks=(2,))
def ends_its_process_at_once(faulty: bool) -> object:
    """A watchdog of one rank ends the process without unwinding anything."""
    rank, size = join()
    healthy = torch.tensor([float(rank != size - 1)])
    if faulty and not healthy:
        os._exit(3)  # here
    dist.all_reduce(healthy)  # here
    return healthy.item()


@pair("exception", 2, "raised", ranks=(1,))
def raises_on_a_broken_sample(faulty: bool) -> object:
    """One rank meets a sample that it cannot read, while the other waits for its gradient."""
    rank, _ = join()
    texts = ["1.5"] if rank == 0 else ["2.5", "n/a" if faulty else "3.0"]
    total = torch.tensor([sum(float(text) for text in texts)])  # here
    dist.all_reduce(total)
    return total.item()


@pair("exception", 2, "deadlock", ranks=(1,))
def swallowed_with_the_reduction(faulty: bool) -> object:
    """Out of a failed batch one rank jumps over the reduction as well, for the ``try`` is around both."""
    rank, _ = join()
    total = torch.zeros(1)
    for row in ("1.0", "x" if rank == 1 else "2.0"):
        loss = torch.zeros(1)
        try:
            loss += float(row)
            if faulty:
                dist.all_reduce(loss)  # here
        except ValueError:
            pass
        if not faulty:
            dist.all_reduce(loss)
        total += loss
    return total.item()


@pair("exception", 2, "raised", ranks=(0,))
def root_fails_before_it_broadcasts(faulty: bool) -> object:
    """Rank 0 looks up a key that a checkpoint lacks; the others already wait for the weights."""
    rank, _ = join()
    weight = torch.zeros(2)
    if rank == 0:
        checkpoint = {"model.weight" if faulty else "weight": torch.ones(2)}
        weight = checkpoint["weight"]  # here
    dist.broadcast(weight, src=0)
    return weight.tolist()


@pair("shutdown", 2, "raised")
def reduced_after_the_group_was_destroyed(faulty: bool) -> object:
    """The final metric is reduced below the line that takes the group down."""
    rank, _ = join()
    metric = torch.tensor([float(rank)])
    if faulty:
        dist.destroy_process_group()
    dist.all_reduce(metric)  # here
    return metric.item()


@pair("shutdown", 2, "deadlock", ranks=(0,))
def destroyed_by_rank_zero_before_the_last_reduction(faulty: bool) -> object:
    """Rank 0 has what it wanted and takes its group down; the other still reduces."""
    rank, _ = join()
    metric = torch.tensor([float(rank)])
    dist.all_reduce(metric)
    if rank == 0 and faulty:
        dist.destroy_process_group()  # here
        return metric.item()
    dist.all_reduce(metric)  # here
    return metric.item()


@pair("shutdown", 3, "deadlock", ranks=(1,))
def subgroup_destroyed_by_one_member(faulty: bool) -> object:
    """One member of a group ends it a step before the other."""
    rank, _ = join()
    group = dist.new_group([1, 2])
    value = torch.tensor([float(rank)])
    if rank == 0:
        return value.item()
    for _ in range(1 if faulty and rank == 1 else 2):
        dist.all_reduce(value, group=group)  # here
    dist.destroy_process_group(group)
    return value.item()
