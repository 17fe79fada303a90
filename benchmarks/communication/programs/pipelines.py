"""Pipeline: stages that count, order or cut micro-batches in another way."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.communication.pairs import join, pair


@pair("pipeline", 2, "deadlock")
def stages_count_other_micro_batches(faulty: bool) -> object:
    """The second stage expects a micro-batch more than the first sends."""
    rank, _ = join()
    micro_batches = 2 + (faulty and rank == 1)
    outputs = []
    for micro_batch in range(micro_batches):
        activations = torch.full((2,), float(micro_batch))
        if rank == 0:
            dist.send(activations, dst=1)
        else:
            dist.recv(activations, src=0)  # here
            outputs.append(activations.sum().item())
    return outputs


@pair("pipeline", 2, "unsafe")
def forwards_first_against_one_forward_one_backward(faulty: bool) -> object:
    """The first stage sends all its activations before it takes a gradient, the second answers each at once."""
    rank, _ = join()
    received, micro_batches = [], 3
    if rank == 1:
        activations = torch.empty(2)
        for _ in range(micro_batches):
            dist.recv(activations, src=0)
            dist.send(activations * 2, dst=0)  # here
        return None
    gradient = torch.empty(2)
    for micro_batch in range(micro_batches):
        dist.send(torch.full((2,), float(micro_batch)), dst=1)  # here
        if not faulty:
            dist.recv(gradient, src=1)
            received.append(gradient.sum().item())
    for _ in range(micro_batches if faulty else 0):
        dist.recv(gradient, src=1)
        received.append(gradient.sum().item())
    return received


@pair("pipeline", 2, "mismatch")
def last_micro_batch_is_smaller(faulty: bool) -> object:
    """The batch does not divide into micro-batches, which the second stage does not know."""
    rank, _ = join()
    batch = torch.arange(5.0) if faulty else torch.arange(6.0)
    sums = []
    for micro_batch in batch.split(2):
        activations = torch.empty(2)
        if rank == 0:
            dist.send(micro_batch.clone(), dst=1)  # here
        else:
            dist.recv(activations, src=0)  # here
            sums.append(activations.sum().item())
    return sums
