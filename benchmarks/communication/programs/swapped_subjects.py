"""Same shape, other order: every call agrees in all but what it is about."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.communication.pairs import join, pair


def _model(layers: int = 2, width: int = 3) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for at, weight in enumerate(model.parameters()):
        nn.init.constant_(weight, at + 1.0)
    return model


@pair("same shape, other order", 2, "mismatch")
def gradients_in_reverse_on_one_rank(faulty: bool) -> object:
    """One rank reduces the gradients of two equal layers from the last to the first."""
    rank, _ = join()
    model = _model()
    model(torch.ones(1, 3) * (rank + 1)).sum().backward()
    weights = list(model.parameters())
    if faulty and rank == 1:
        weights.reverse()
    for weight in weights:
        dist.all_reduce(weight.grad)  # here
    return [weight.grad.sum().item() for weight in model.parameters() if weight.grad is not None]


@pair("same shape, other order", 2, "mismatch")
def buffers_in_the_order_of_a_set(faulty: bool) -> object:
    """Running mean and variance are broadcast in the order in which each rank's set has their names."""
    rank, _ = join()
    norm = nn.BatchNorm1d(3)
    norm.get_buffer("running_mean").fill_(5.0 + rank)
    norm.get_buffer("running_var").fill_(7.0 + rank)
    names = ["running_mean", "running_var"]
    if faulty and rank == 1:
        names.reverse()
    for name in names:
        dist.broadcast(norm.get_buffer(name), src=0)  # here
    return [norm.get_buffer(name).tolist() for name in ("running_mean", "running_var")]


@pair("same shape, other order", 2, "mismatch")
def gradients_reduced_by_hooks_as_they_are_ready(faulty: bool) -> object:
    """Hooks reduce each gradient when it is there; one rank calls its two branches in the other order."""
    rank, _ = join()
    model = _model()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda ready: dist.all_reduce(ready.grad))  # here
    branches = [model[0], model[1]]
    if faulty and rank == 1:
        branches.reverse()
    for branch in branches:
        branch(torch.ones(1, 3) * (branch.weight.mean().detach() + rank)).sum().backward()  # here
    return [weight.grad.sum().item() for weight in model.parameters() if weight.grad is not None]
