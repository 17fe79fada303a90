"""Training: wrapped and sharded models, data and decisions of each rank, and its end."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.communication.pairs import join, pair


def _layers(*widths: int) -> nn.Sequential:
    layers = nn.Sequential(*(nn.Linear(ins, outs, bias=False) for ins, outs in itertools.pairwise(widths)))
    for weight in layers.parameters():
        nn.init.ones_(weight)
    return layers


@pair("data parallel", 2, "mismatch", "deadlock")
def buckets_of_another_size(faulty: bool) -> object:
    """One rank was started with another size of buckets."""
    rank, _ = join()
    size = 1e-5 if faulty and rank == 1 else 25
    model = DistributedDataParallel(_layers(2, 3, 1), bucket_cap_mb=size, find_unused_parameters=True)
    model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return [weight.grad.sum().item() for weight in model.module.parameters()]


@pair("data parallel", 2, "mismatch", "deadlock")
def joined_on_one_rank(faulty: bool) -> object:
    """Only the rank that may run out of data enters ``join``, which tells the others so by a reduction."""
    rank, _ = join()
    model = DistributedDataParallel(_layers(2, 1))
    with nullcontext() if faulty and rank == 0 else model.join():
        model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return model.module[0].weight.grad.tolist()


@pair("sharded parameters", 2, "mismatch")
def one_rank_keeps_its_weights_after_the_forward(faulty: bool) -> object:
    """One rank has memory to spare and does not gather weights again in the backward."""
    rank, size = join()
    model = _layers(2, 4, 2)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not (faulty and rank == 1))
    model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    return [weight.grad.to_local().sum().item() for weight in model.parameters()]


@pair("sharded parameters", 2, "deadlock", ranks=(1,))
def gradients_accumulated_on_one_rank(faulty: bool) -> object:
    """One rank still accumulates in the last micro-batch, and does not reduce."""
    rank, size = join()
    model = _layers(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)), reshard_after_forward=False)
    for micro_batch in range(2):
        last = micro_batch == (2 if faulty and rank == 1 else 1)
        model.set_requires_gradient_sync(last)
        model(torch.full((1, 2), float(rank + 1))).sum().backward()  # here
    gradient = model[0].weight.grad
    return None if gradient is None else gradient.to_local().sum().item()


@pair("local decision", 2, "deadlock", ranks=(1,))
def clipped_where_the_own_shard_is_large(faulty: bool) -> object:
    """Whether gradients are clipped is decided by the norm of the own shard; clipping reduces the norm of all."""
    _, size = join()
    model = _layers(1, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    rows = torch.ones(1, 1)
    (model(rows) * torch.tensor([8.0, 0.5])).sum().backward()
    gradient = model[0].weight.grad
    if not faulty or gradient.to_local().norm() > 1.0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
        return bool(norm.full_tensor() > 1.0)  # here
    return False


@pair("uneven data", 2, "deadlock", ranks=(1,))
def rest_of_an_accumulation_is_a_step(faulty: bool) -> object:
    """Gradients of two batches make a step, and so does the rest: five batches make a step more than four."""
    rank, _ = join()
    batches = [float(at) for at in range(5 - rank)]
    most = torch.tensor([len(batches)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    count = len(batches) if faulty else int(most)
    gradient, steps = torch.zeros(1), []
    for at in range(count):
        gradient += batches[at] if at < len(batches) else 0.0
        if at % 2 or at + 1 == count:
            dist.all_reduce(gradient)  # here
            steps.append(gradient.item())
            gradient = torch.zeros(1)
    return steps


def _on_rank_zero(measured: Callable[[], float]) -> Callable[[], float]:
    """Call it on rank 0 and take 0 elsewhere."""

    @functools.wraps(measured)
    def wrapped() -> float:
        return measured() if dist.get_rank() == 0 else 0.0

    return wrapped


@pair("rank-0 branch", 2, "deadlock", ranks=(0,))
def decorator_that_hides_the_branch(faulty: bool) -> object:
    """A decorator lets only rank 0 run the logging, which has come to reduce what it logs."""
    rank, _ = join()

    def throughput() -> float:
        seconds = torch.tensor([1.0 + rank])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # here
        return seconds.item()

    measured = _on_rank_zero(throughput)() if faulty else throughput()  # here
    return measured if rank == 0 else None


@pair("exception", 2, "deadlock", ranks=(1,))
def step_tried_again_with_its_reduction(faulty: bool) -> object:
    """A step that fails behind its reduction is tried again, with the reduction."""
    rank, _ = join()
    failures, losses = [1] if rank == 1 else [], []

    def write_log(step: int) -> None:
        if step in failures:
            failures.remove(step)
            raise OSError("disk full")

    for step in range(2):
        loss = None
        while loss is None or loss.item() < 0:
            try:
                if faulty or loss is None:
                    loss = torch.tensor([float(rank + step)])
                    dist.all_reduce(loss)  # here
                write_log(step)
            except OSError:
                loss = None if faulty else loss
        losses.append(loss.item())
    return losses


@pair("early exit", 2, "lost", "exited", ranks=(1,))
def process_killed_in_the_middle(faulty: bool) -> object:
    """The system kills the process that takes most memory, while the other waits for its gradient."""
    rank, _ = join()
    gradient = torch.tensor([float(rank)])
    dist.all_reduce(gradient)
    if faulty and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # here
    dist.all_reduce(gradient)  # here
    return gradient.item()
