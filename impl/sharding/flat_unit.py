"""FlatUnit: the parameters that are gathered and freed together, and the collectives that do it.

A unit owns at most two flat buffers: its trainable parameters, and its frozen ones, which have no gradient and are
never reduced. Between uses only the shards hold memory; ``unshard`` all-gathers, ``reshard`` frees, and
``reduce_gradients`` turns the full local gradient into this rank's shard of the averaged one.

Source: FSDP, Zhao et al. 2023, arXiv:2304.11277; the freed-and-refilled storage under unchanged parameter objects is
what ``torch.distributed.fsdp.fully_shard`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from . import collectives, flat_buffer
from .collectives import Axis
from .parameter_slots import Slot, parameter_at
from .protocol import Gradients


class FlatUnit:
    """``named`` parameters of ``module``, by canonical name, sharded over ``axis``; it may be empty.

    ``fqn`` is the canonical name of the module, "(root)" for the root. ``replicas`` is the axis over which shards are
    copies of each other (HSDP). Every rank must pass equal values.

    With ``compute_dtype`` the model computes with parameters of that dtype, gathered in it, while shards keep theirs,
    and gradients of several backwards are added up and reduced in the shards'.
    """

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        slots: list[Slot],
        axis: Axis,
        replicas: Axis = collectives.ALONE,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        computing = replace_dtype(named, slots, compute_dtype)
        self.fqn = fqn or "(root)"
        self.module = module
        self.axis, self.replicas = axis, replicas
        self.trainable = _buffer(named, axis, True, computing)
        self.frozen = _buffer(named, axis, False, computing)
        self.buffers = [buffer for buffer in (self.trainable, self.frozen) if buffer is not None]
        self.is_unsharded = True
        self.reshard()

    def unshard(self) -> None:
        """All-gather the parameters; nothing if they are there already."""
        if self.is_unsharded:
            return
        for buffer in self.buffers:
            full = buffer.allocate()
            collectives.all_gather(self, full, buffer.shard.detach().to(full.dtype), self.axis)
            buffer.attach()
        self.is_unsharded = True

    def reshard(self) -> None:
        """Free the gathered parameters, keep the shard. With one rank there is nothing to free: they are the shard."""
        if not self.is_unsharded or all(buffer.is_shard for buffer in self.buffers):
            return
        for buffer in self.buffers:
            buffer.free()
        self.is_unsharded = False

    def reduce_gradients(self) -> None:
        """Average the full local gradients over all ranks and add this rank's piece [s] to the shard's gradient.

        First over the shards' axis, then, only the piece, over the replicas. Every rank must call it, in the same order
        of units, whatever gradients it has: a parameter without one counts as zero. Local gradients are released.
        """
        if self.trainable is None:
            return
        full = self.trainable.pack(self.trainable.local_gradients())
        self.drop_local_gradients()
        piece = collectives.reduce_scatter_average(self, full, self.axis)
        self.accumulate(collectives.all_reduce_average(self, piece, self.replicas))

    def add_gradients(self, gradients: Gradients) -> None:
        """Add whole local gradients of the trainable parameters to those that backwards have left."""
        if self.trainable is None:
            return
        for name, gradient in gradients(self.trainable.names).items():
            self.trainable.add_local(self.trainable.names.index(name), gradient)

    def lift_gradients(self) -> None:
        """Before a further backward: what earlier ones have left is added up in the shards' dtype, not the model's."""
        if self.trainable is not None:
            self.trainable.lift_gradients()

    def accumulate(self, gradient: Tensor) -> None:
        """Add a reduced ``gradient`` [s] to the shard's: several micro-batches of one step may be reduced apart."""
        assert self.trainable is not None
        shard = self.trainable.shard
        shard.grad = gradient if shard.grad is None else shard.grad + gradient

    def drop_local_gradients(self) -> None:
        """Forget unreduced gradients."""
        for buffer in self.buffers:
            buffer.drop_local_gradients()


def gather_whole(pieces: Sequence[tuple[flat_buffer.FlatBuffer, Tensor]], axis: Axis) -> dict[str, Tensor]:
    """Whole tensors by canonical name, all new, from every rank's ``pieces`` [s] of some buffers. All ranks call it.

    To show parameters or gradients, not to train: everything of one dtype travels in one all-gather, and no unit
    changes its state.
    """
    whole: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(piece.dtype for _, piece in pieces):
        chosen = [(buffer, piece) for buffer, piece in pieces if piece.dtype == dtype]
        own = torch.cat([piece for _, piece in chosen])
        everyone_WS = own.new_empty(axis.size, own.numel())
        collectives.all_gather(collectives.WHOLE, everyone_WS.view(-1), own, axis)
        columns = torch.split_with_sizes(everyone_WS, [buffer.shard_numel for buffer, _ in chosen], dim=1)
        for (buffer, _), column_Ws in zip(chosen, columns, strict=True):
            whole.update(zip(buffer.names, buffer.views(column_Ws.reshape(-1)), strict=True))
    return whole


def replace_dtype(
    named: Mapping[str, nn.Parameter], slots: Sequence[Slot], dtype: torch.dtype | None
) -> dict[str, nn.Parameter] | None:
    """Put parameters of ``dtype`` into all ``slots`` in place of ``named``; by name, None if none differs."""
    if dtype is None or all(parameter.dtype == dtype for parameter in named.values()):
        return None
    made = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad) for p in named.values()}
    for slot in slots:
        slot.module._parameters[slot.attribute] = made[id(parameter_at(slot))]
    return {name: made[id(parameter)] for name, parameter in named.items()}


def _buffer(
    named: Mapping[str, nn.Parameter], axis: Axis, trainable: bool, computing: Mapping[str, nn.Parameter] | None
) -> flat_buffer.FlatBuffer | None:
    chosen = {name: p for name, p in named.items() if p.requires_grad == trainable}
    if not chosen:
        return None
    return flat_buffer.FlatBuffer(
        chosen, axis, trainable, None if computing is None else [computing[n] for n in chosen]
    )
