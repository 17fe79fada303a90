"""Initial values: those of rank 0 on every rank of every replica, whatever each of them has built.

All ranks must call both functions together. First over the replicas, so that the first rank of each has them, then
inside each: what FSDP1 does with ``sync_module_states=True`` (``_init_param_handle_from_module`` of torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from . import collectives
from .collectives import Axis, Named, Subject
from .parameter_slots import Slot, parameter_at


def sync_parameters(unit_name: str, places: Sequence[Sequence[Slot]], shards: Axis, replicas: Axis) -> None:
    """The whole parameters of one unit, "" for the root, become rank 0's in place."""
    _broadcast(Subject(unit_name or "(root)"), (parameter_at(uses[0]) for uses in places), shards, replicas)


def sync_buffers(module: nn.Module, shards: Axis, replicas: Axis) -> None:
    """The buffers of ``module`` that have memory become rank 0's in place."""
    held = (buffer for buffer in module.buffers() if not buffer.is_meta)
    _broadcast(Subject("(buffers)"), held, shards, replicas)


def _broadcast(unit: Named, tensors: Iterable[Tensor], shards: Axis, replicas: Axis) -> None:
    for tensor in tensors:
        for axis in (replicas, shards):
            collectives.broadcast(unit, tensor.detach(), axis)
