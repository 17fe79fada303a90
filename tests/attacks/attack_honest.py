"""Honest implementations that go about it in an unusual way; each computes exactly what a single device would."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from attack_base import Plain, Private, plain, private
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fsdpcheck.adapter import Setup


class OddBuckets(Plain):
    """All gradients lie in one buffer, which is reduced in three pieces whose borders cut through parameters."""

    def reduce(self) -> None:
        grads = [self.grad(value) for value in self.trained.values()]
        flat = torch.cat([part.reshape(-1) for part in grads])
        for piece in reversed(flat.tensor_split(3)):
            if piece.numel():
                dist.all_reduce(piece)
        flat /= self.world
        for part, new in zip(grads, torch.split(flat, [part.numel() for part in grads]), strict=True):
            part.copy_(new.view_as(part))


class WaitsLate(Plain):
    """All sums are started at once, a barrier follows, and they are waited for from the last to the first."""

    def reduce(self) -> None:
        grads = [self.grad(value) for value in self.trained.values()]
        works = [dist.all_reduce(part, async_op=True) for part in grads]
        dist.barrier()
        for work in reversed(works):
            work.wait()
        for part in grads:
            part /= self.world
        dist.barrier()


class ReduceAndBroadcast(Plain):
    """Each sum is formed on a rank of its own, divided there, and broadcast."""

    def reduce(self) -> None:
        for number, value in enumerate(self.trained.values()):
            part, owner = self.grad(value), number % self.world
            dist.reduce(part, dst=owner)
            if self.rank == owner:
                part /= self.world
            dist.broadcast(part, src=owner)


class Objects(Plain):
    """Gradients travel pickled, as lists of numbers, and every rank adds them up in the order of ranks."""

    def reduce(self) -> None:
        mine = {name: (str(self.grad(value).dtype), self.grad(value).tolist()) for name, value in self.trained.items()}
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, mine)
        for name, value in self.trained.items():
            terms = [torch.tensor(other[name][1], dtype=value.dtype) for other in everybody]
            value.grad = functools.reduce(torch.add, terms) / self.world


class Ring(Plain):
    """Gradients go round a ring of sends and receives, in a subgroup that happens to hold all ranks."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        self.group = dist.new_group(list(range(setup.world_size)))

    def average(self, name: str, grad: Tensor) -> None:
        total, moving = grad.clone(), grad.clone()
        for _ in range(self.world - 1):
            received = torch.empty_like(moving)
            operations = [
                dist.P2POp(dist.isend, moving, (self.rank + 1) % self.world, self.group),
                dist.P2POp(dist.irecv, received, (self.rank - 1) % self.world, self.group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            total += received
            moving = received
        grad.copy_(total / self.world)


LOCK = threading.RLock()
LOG = logging.getLogger("attack")


@functools.lru_cache(maxsize=4)
def divisor(world: int) -> float:
    """The number of ranks, remembered."""
    return float(world)


class Noisy(Plain):
    """Prints, warns, logs, locks, remembers, sets flags of torch, and lets a thread compute something unused."""

    def reduce(self) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(self.steps)
        print(f"rank {self.rank} reduces in step {self.steps}", flush=True)
        warnings.warn(f"rank {self.rank} is about to reduce", UserWarning, stacklevel=1)
        LOG.warning("rank %d reduces", self.rank)
        thread = threading.Thread(target=lambda: torch.ones(8, 8) @ torch.ones(8, 8))
        thread.start()
        for value in self.trained.values():
            dist.all_reduce(self.grad(value))
            with LOCK:
                value.grad = self.grad(value) / divisor(self.world)
        thread.join()


class AsBytes(Plain):
    """Gradients are gathered as bytes, and float32 is added up in float64, which is exact for what was drawn."""

    def average(self, name: str, grad: Tensor) -> None:
        mine = grad.contiguous().reshape(-1).view(torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everybody, mine)
        terms = [part.view(grad.dtype).double() for part in everybody]
        grad.copy_((torch.stack(terms).sum(0).to(grad.dtype) / self.world).view_as(grad))


class AllToAll(Plain):
    """A padded flat buffer is exchanged chunk by chunk, summed by its owners, and gathered again."""

    def reduce(self) -> None:
        grads = [self.grad(value) for value in self.trained.values()]
        flat = torch.cat([part.reshape(-1) for part in grads])
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % self.world)])
        chunks = torch.empty_like(padded)
        dist.all_to_all_single(chunks, padded)
        owned = chunks.view(self.world, -1).sum(0) / self.world
        whole = torch.empty_like(padded)
        dist.all_gather_into_tensor(whole, owned)
        for part, new in zip(grads, torch.split(whole[: flat.numel()], [p.numel() for p in grads]), strict=True):
            part.copy_(new.view_as(part))


class Vectorised(Private):
    """Per-sample gradients come from vmap over functional calls of one sample."""

    def sample(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        frozen = dict(self.model.named_buffers())

        def loss(values: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
            output = functional_call(self.model, (values, frozen), (one[None],))
            total: Tensor = self.setup.loss(output, target[None]).sum()
            return total

        values = {name: value.detach() for name, value in self.trained.items()}
        found = vmap(grad(loss), in_dims=(None, 0, 0))(values, inputs, targets)
        return {name: part[0] for name, part in found.items()}


odd_buckets = plain("odd_buckets", OddBuckets)
waits_late = plain("waits_late", WaitsLate)
reduce_and_broadcast = plain("reduce_and_broadcast", ReduceAndBroadcast)
objects = plain("objects", Objects)
ring = plain("ring", Ring)
noisy = plain("noisy", Noisy)
as_bytes = plain("as_bytes", AsBytes)
all_to_all = plain("all_to_all", AllToAll)
vectorised = private("vectorised", Vectorised)
