"""ShardedModel: a model whose parameters are gathered unit by unit around forward and backward.

Per unit: gather before its forward, free after it (unless ``reshard_after_forward`` is off; the root unit is always
kept, it is needed again at once), gather when the gradient of its output arrives, free when the gradients of its inputs
are complete. Gathers follow the order in which the model runs, which is the same on every rank as long as control flow
does not depend on the data; a micro-batch of zero rows runs the same forward and backward.

Reductions are *not* issued from autograd. They come after the backward, in one fixed order, for every unit, whether or
not this rank has a gradient for it. No set of used parameters, no number of rows and no completion order can make two
ranks disagree (bug classes: PyTorch issues 158719, 64629).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import initial_sync
from .collectives import ALONE, Axis
from .flat_unit import FlatUnit, gather_whole
from .nested_tensors import tensors_in
from .parameter_slots import (
    Initial,
    Slot,
    by_unit,
    change,
    materialise,
    parameter_at,
    placed,
    refuse_sharded,
    shared_slots,
)
from .protocol import Gradients, Piece
from .spans import Span


class ShardedModel:
    """``module`` sharded in place: one unit for each module named in ``unit_names``, and the root unit for the rest.

    A parameter belongs to the innermost unit that contains all of its uses; one that is tied across units therefore
    belongs to the root. Gradients accumulate, full-sized and in the shards' dtype, over backwards until
    ``reduce_gradients`` is called.
    Raises ValueError for a module of which something is sharded already.
    With ``replicas`` (HSDP) parameters are sharded over ``axis`` only, and each replica holds them all.

    ``compute_dtype``: gather and compute in that dtype; shards, reductions and the optimizer keep the parameters' own.
    ``initial(name, shape)`` gives whole values for parameters on the meta device, one at a time; no more than one unit
    is ever whole. Equal on all ranks, unless ``sync_module_states``.
    ``sync_module_states``: parameters and buffers start as rank 0's on all ranks and replicas, whatever these have
    built; without it all must have built the same.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_names: Sequence[str],
        axis: Axis,
        reshard_after_forward: bool,
        replicas: Axis = ALONE,
        *,
        compute_dtype: torch.dtype | None = None,
        initial: Initial | None = None,
        sync_module_states: bool = False,
    ) -> None:
        self.module = module
        self.axis = axis
        self.reshard_after_forward = reshard_after_forward
        self.steps_taken = 0
        self._frees_after_backward = True
        self._done_at: MutableMapping[Tensor, list[FlatUnit]] = WeakTensorKeyDictionary()
        """The units whose backward is done when the gradient of a unit's output arrives: it went straight into them."""
        self._pending: Gradients | None = None
        self.replicas = replicas
        refuse_sharded(module)
        self.places = shared_slots(module)
        self.units = make_units(
            module, unit_names, axis, replicas, self.places, compute_dtype, initial, sync_module_states
        )
        self._placed = placed(self.places)
        self._buffers = {name: buffer for unit in self.units for buffer in unit.buffers for name in buffer.names}
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward, each unit gathered when its turn comes. All ranks must call it together.

        Raises RuntimeError, before any communication, for parameters that were changed after wrapping.
        """
        if changed := change(self.module, self._placed):
            raise RuntimeError(changed)
        return self.module(*inputs)

    def backward(self, outputs: Tensor, gradients: Tensor, *, sync: bool = True) -> None:
        """Backpropagate ``gradients`` from ``outputs`` (equal shapes); gradients stay local and full-sized.

        Nothing is reduced here, whatever ``sync`` says: see ``reduce_gradients``.
        Outputs that depend on no trainable parameter are allowed: then there is nothing to do, on any rank.
        """
        for unit in self.units:
            unit.lift_gradients()
        if outputs.requires_grad:
            torch.autograd.backward(outputs, gradients)

    def reduce_gradients(self) -> None:
        """Average the gradients accumulated so far over the ranks, unit by unit, in the fixed order."""
        pending, self._pending = self._pending, None
        for unit in reduction_order(self.units):
            if pending is not None:
                unit.add_gradients(pending)
            unit.reduce_gradients()

    def reshard(self) -> None:
        """Free whatever is still gathered."""
        for unit in self.units:
            unit.reshard()

    @contextmanager
    def gradients_of_outputs(self, *, again: bool) -> Iterator[None]:
        """Around a backward to layer outputs only. If it comes ``again``, units kept after forward stay gathered."""
        self._frees_after_backward = not again
        try:
            yield
        finally:
            self._frees_after_backward = True
            for unit in self.units:
                if again:
                    self._free_unless_kept(unit)
                else:
                    unit.reshard()

    def shards(self) -> list[nn.Parameter]:
        """The trainable shards: what an optimizer updates. All of them, also those that are wholly padding."""
        return [unit.trainable.shard for unit in self.units if unit.trainable is not None]

    def zero_grad(self) -> None:
        """Forget reduced and unreduced gradients."""
        self._pending = None
        for unit in self.units:
            unit.drop_local_gradients()
            if unit.trainable is not None:
                unit.trainable.shard.grad = None

    def add_gradients(self, gradients: Gradients, *, sync: bool) -> None:
        """Add whole local gradients to what the backwards have left: now, or with ``sync`` while reducing."""
        if sync:
            self._pending = gradients
            return
        for unit in self.units:
            unit.add_gradients(gradients)

    def frozen_shards(self) -> list[nn.Parameter]:
        """The shards that no optimizer updates."""
        return [unit.frozen.shard for unit in self.units if unit.frozen is not None]

    def cut(self, shard: nn.Parameter, like: Tensor) -> dict[str, Span]:
        """The parameters in one unit's shard, by canonical name, as live spans of ``like`` [s], without padding."""
        return next(b.cut(like) for unit in self.units for b in unit.buffers if b.shard is shard)

    def pieces(self) -> list[Piece]:
        """This rank's pieces of the trainable parameters: units in forward order, root first."""
        return [piece for unit in self.units if unit.trainable is not None for piece in unit.trainable.pieces()]

    def owned(self, name: str) -> slice:
        """The part of the flattened parameter that lies in this rank's shard; maybe empty."""
        buffer = self._buffers[name]
        return buffer.owned(buffer.names.index(name))

    def in_root(self, name: str) -> bool:
        """Whether the parameter belongs to the root unit."""
        return self._buffers[name] in self.units[0].buffers

    def is_unit(self, module: nn.Module) -> bool:
        """Whether ``module`` is gathered and freed on its own."""
        return any(unit.module is module for unit in self.units)

    def abandon(self) -> None:
        """Free gathered units and drop gradients, without communication."""
        self.reshard()
        self.zero_grad()

    def full_values(self) -> dict[str, Tensor]:
        """Every parameter, whole and new, by canonical name. Communicates."""
        buffers = [buffer for unit in self.units for buffer in unit.buffers]
        return gather_whole([(buffer, buffer.shard.detach()) for buffer in buffers], self.axis)

    def full_gradients(self) -> dict[str, Tensor]:
        """Every reduced gradient, whole and new, by canonical name; zeros before the first reduction. Communicates."""
        buffers = [unit.trainable for unit in self.units if unit.trainable is not None]
        gradients = [torch.zeros_like(b.shard) if b.shard.grad is None else b.shard.grad.detach() for b in buffers]
        return gather_whole(list(zip(buffers, gradients, strict=True)), self.axis)

    def _free_unless_kept(self, unit: FlatUnit) -> None:
        if self.reshard_after_forward and unit is not self.units[0]:
            unit.reshard()

    def _before_forward(self, unit: FlatUnit, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        unit.unshard()
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if not torch.is_grad_enabled() or not tensors or any(tensor.is_leaf for tensor in tensors):
            return
        if len(tensors) == 1 and tensors[0] in self._done_at:
            self._done_at[tensors[0]].append(unit)
        else:
            register_multi_grad_hook(tensors, lambda _: self._after_backward(unit))

    def _after_forward(self, unit: FlatUnit, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                done: list[FlatUnit] = []
                self._done_at[tensor] = done
                tensor.register_hook(partial(self._before_backward, unit, done))  # type: ignore[no-untyped-call]
        self._free_unless_kept(unit)

    def _before_backward(self, unit: FlatUnit, done: Sequence[FlatUnit], gradient: Tensor) -> None:
        """Free the units that this output went into, then gather its own: one at a time, also if they are the same."""
        for other in done:
            self._after_backward(other)
        unit.unshard()

    def _after_backward(self, unit: FlatUnit) -> None:
        if self._frees_after_backward:
            unit.reshard()
        else:
            self._free_unless_kept(unit)


def reduction_order(units: Sequence[FlatUnit]) -> list[FlatUnit]:
    """The one order in which every rank reduces gradients: last unit of the forward first, root last."""
    return list(reversed(units))


def make_units(
    module: nn.Module,
    unit_names: Sequence[str],
    axis: Axis,
    replicas: Axis = ALONE,
    places: Sequence[Sequence[Slot]] | None = None,
    compute_dtype: torch.dtype | None = None,
    initial: Initial | None = None,
    sync_module_states: bool = False,
) -> list[FlatUnit]:
    """The root unit, then one unit a name, in the given (forward) order. Raises KeyError for an unknown module.

    ``places``: ``shared_slots(module)``, if it is known already.
    """
    places = shared_slots(module) if places is None else places
    modules = dict(module.named_modules(remove_duplicate=False))
    if sync_module_states:
        initial_sync.sync_buffers(module, axis, replicas)
    units = []
    for name, positions in by_unit(module, unit_names, places).items():
        owned = [places[position] for position in positions]
        materialise(owned, initial)
        if sync_module_states:
            initial_sync.sync_parameters(name, owned, axis, replicas)
        named = {uses[0].name: parameter_at(uses[0]) for uses in owned}
        slots = [slot for uses in owned for slot in uses]
        units.append(FlatUnit(name, modules[name], named, slots, axis, replicas, compute_dtype))
    return units
