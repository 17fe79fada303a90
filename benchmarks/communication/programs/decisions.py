"""Local decision: a number of one rank decides about a call of all."""

from __future__ import annotations

import math
import random

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("local decision", 2, "deadlock", ranks=(1,))
def step_skipped_where_the_loss_is_not_finite(faulty: bool) -> object:
    """A rank whose loss is not a number skips the step, and with it the reduction."""
    rank, _ = join()
    loss = torch.tensor([math.nan if rank == 1 else 1.0])
    finite = torch.isfinite(loss).float()
    if not faulty:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    gradient = torch.ones(2)
    if finite.item():
        dist.all_reduce(gradient)  # here
    return gradient.tolist()


@pair("local decision", 2, "deadlock", ranks=(1,))
def early_stopping_on_the_own_loss(faulty: bool) -> object:
    """Training ends when the rank's own loss has stopped to fall."""
    rank, _ = join()
    losses = [3.0, 2.0, 1.0] if rank == 0 else [3.0, 4.0, 1.0]
    best, steps = math.inf, 0
    for own in losses:
        loss = torch.tensor([own])
        dist.all_reduce(loss)  # here
        watched = own if faulty else loss.item()
        if watched > best:
            break
        best, steps = watched, steps + 1
    return steps


@pair("local decision", 3, "deadlock", ranks=(2,))
def dropped_layer_by_the_own_dice(faulty: bool) -> object:
    """Layers are dropped by a random number whose seed is the rank; a layer that stays reduces."""
    rank, _ = join()
    dice = random.Random((5 if rank < 2 else 7) if faulty else 5)
    output = torch.ones(1)
    for _ in range(3):
        if dice.random() < 0.5:
            continue
        dist.all_reduce(output)  # here
    return output.item()
