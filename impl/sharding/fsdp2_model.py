"""PerParameterModel: each parameter sharded on its first dim, by PyTorch's ``fully_shard`` (FSDP2).

Gathering, freeing and, in a backward that forms parameter gradients, reducing are FSDP2's. What is added here is the
rest of ``sharded.Sharded``: a first backward that reduces nothing, and the reduction of gradients that no backward has
formed (bookkeeping), in one fixed order of units.

Uses public API only: ``FSDPModule.set_requires_gradient_sync`` and ``set_reshard_after_backward``, and DTensors.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from . import collectives, fsdp2_units, initial_sync
from .collectives import ALONE
from .fsdp2_units import Unit
from .ignored_parameters import IgnoredParameters
from .parameter_slots import (
    Initial,
    by_unit,
    change,
    flag_of_gathered,
    materialise,
    parameter_at,
    placed,
    refuse_sharded,
    shared_slots,
)
from .protocol import Gradients, Piece
from .row_layout import RowLayout
from .spans import Span


class PerParameterModel:
    """``module`` sharded in place: a ``fully_shard`` group for each module named in ``unit_names``, then the root.

    ``mesh`` has one axis, or two for HSDP: (replicas, shards). The root stays gathered between forward and backward: it
    is needed again at once. ``ignored`` parameters, by canonical name, are not sharded (ignored_parameters.py).
    PyTorch's optimizers update them together with DTensors only with ``foreach=False``, their default on a CPU.

    Raises ValueError for a parameter that is used in two units, which ``fully_shard`` would quietly untie, for one
    without rows (0-dim), unless they are ignored; for an unknown ignored one, or any together with a ``compute_dtype``,
    which nobody would cast them to; and for a module of which something is sharded already.

    ``compute_dtype``, ``initial`` and ``sync_module_states``: as for ``wrap.ShardedModel``.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_names: Sequence[str],
        mesh: DeviceMesh,
        reshard_after_forward: bool,
        *,
        compute_dtype: torch.dtype | None = None,
        initial: Initial | None = None,
        sync_module_states: bool = False,
        ignored: Collection[str] = (),
    ) -> None:
        self.module = module
        self.reshard_after_forward = reshard_after_forward
        self.steps_taken = 0
        self.axis = collectives.axis(mesh.get_group(mesh.ndim - 1))
        self.replicas = collectives.axis(mesh.get_group(0)) if mesh.ndim == 2 else ALONE
        refuse_sharded(module)
        self.places = shared_slots(module)
        fsdp2_units.refuse_ignored(ignored, self.places, compute_dtype)
        self.units = fsdp2_units.units(module, unit_names, self.places, self.axis.size, ignored)
        self._unit_of = {name: unit for unit in self.units for name in unit.names}
        modules = dict(module.named_modules(remove_duplicate=False))
        if sync_module_states:
            initial_sync.sync_buffers(module, self.axis, self.replicas)
        for name, positions in reversed(by_unit(module, unit_names, self.places).items()):  # the root last
            owned = [self.places[position] for position in positions]
            materialise(owned, initial)
            if sync_module_states:
                initial_sync.sync_parameters(name, owned, self.axis, self.replicas)
            left_out = {parameter_at(uses[0]) for uses in self.places if uses[0].name in ignored}
            fsdp2_units.shard(modules[name], mesh, reshard_after_forward and name != "", compute_dtype, left_out)
        assert isinstance(module, FSDPModule)
        self._root: FSDPModule = module
        self._parameters = {uses[0].name: parameter_at(uses[0]) for uses in self.places}
        whole = {name: parameter for name, parameter in self._parameters.items() if name in ignored}
        self._left_out = IgnoredParameters(whole, self.axis, self.replicas)
        self._placed = placed(self.places)
        self._added: dict[str, Tensor] = {}
        self._pending: Gradients | None = None
        self._has_added = False
        self._ran = self._lost = False
        self._lifts = compute_dtype is not None and any(p.dtype != compute_dtype for p in self._parameters.values())
        self._holds_lifted = False
        """Whether ``fully_shard`` has added up gradients in the parameters' dtype, of which nothing public tells."""

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward, each unit gathered when its turn comes. All ranks must call it together."""
        if self._lost:
            raise RuntimeError(
                "a step raised, and this torch cannot reset fully_shard after that (2.13 can, but for micro-batches"
                " that were added up in mixed precision): the next gradients would be wrong; shard a new model and load"
                " its state"
            )
        if change(self.module, self._placed):
            if changed := flag_of_gathered(self._placed):
                raise RuntimeError(changed)
            self.reshard()  # whoever gathered a unit by hand is no culprit
        if changed := change(self.module, self._placed):
            raise RuntimeError(changed)
        self._ran = True
        return self.module(*inputs)

    def backward(self, outputs: Tensor, gradients: Tensor, *, sync: bool) -> None:
        """Backpropagate ``gradients`` from ``outputs``; with ``sync`` FSDP2 reduces unit by unit as it goes."""
        self._root.set_requires_gradient_sync(sync)
        self._left_out.before_backward()
        if outputs.requires_grad:
            self._holds_lifted = self._lifts
            torch.autograd.backward(outputs, gradients)
            self._holds_lifted = self._lifts and not sync

    @contextmanager
    def gradients_of_outputs(self, *, again: bool) -> Iterator[None]:
        """Around a backward to layer outputs only: nothing is reduced; if it comes ``again``, kept units stay."""
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(self.reshard_after_forward or not again)
        self._root.set_reshard_after_backward(not again, recurse=False)  # the root is needed again at once
        try:
            yield
        finally:
            self._root.set_reshard_after_backward(True)

    def add_gradients(self, gradients: Gradients, *, sync: bool) -> None:
        """Add whole local gradients for the next ``reduce_gradients``: now, or with ``sync`` while reducing."""
        self._has_added = True
        if sync:
            self._pending = gradients
            return
        for names in (*(unit.names for unit in self.units), self._left_out.names):
            self._add(gradients(names))

    def reduce_gradients(self) -> None:
        """Average added gradients over the ranks, unit by unit, last unit first, then those of ignored parameters.

        What backwards have formed is reduced already, but for ignored parameters. Whether gradients are added is a mode
        of the whole step, the same on every rank; a parameter without one on this rank counts as zero.
        """
        has_added, pending = self._has_added, self._pending
        self._has_added, self._pending = False, None
        for unit in reversed(self.units if has_added else []):
            if pending is not None:
                self._add(pending(unit.names))
            if unit.names:
                self._reduce(unit)
        names = self._left_out.names
        if pending is not None:
            self._add(pending(names))
        self._left_out.average({name: self._added.pop(name) for name in names if name in self._added})

    def reshard(self) -> None:
        """Free whatever is still gathered."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def zero_grad(self) -> None:
        """Forget reduced and added gradients."""
        self._added, self._pending, self._has_added = {}, None, False
        self._left_out.forget()
        self.module.zero_grad()
        for parameter in self._parameters.values():  # the module shows others while a unit is gathered
            parameter.grad = None

    def abandon(self) -> None:
        """Free gathered units and drop gradients, without communication.

        Before torch 2.13 ``fully_shard`` has no way back from a backward that raised: it would skip the end of the next
        one, and some gradients with it, silently. Then the next forward raises RuntimeError instead. 2.13 has one that
        keeps gradients of micro-batches that were not reduced; they go when the next forward shows them. In mixed
        precision it shows none, and RuntimeError is raised if there are any.
        """
        if hasattr(self._root, "reset_iter_state"):
            if self._ran:  # before a first forward there is nothing to reset, and 2.13 raises AttributeError
                self._root.reset_iter_state()
                for module in self.module.modules():
                    if isinstance(module, FSDPModule):
                        _forget_unreduced(module)
            self._lost = self._lost or self._holds_lifted
        else:
            self._lost = self._ran
        self.reshard()
        self.zero_grad()

    def shards(self) -> list[nn.Parameter]:
        """The trainable parameters, as DTensors but for ignored ones."""
        return [parameter for parameter in self._parameters.values() if parameter.requires_grad]

    def frozen_shards(self) -> list[nn.Parameter]:
        """The frozen parameters, as DTensors but for ignored ones."""
        return [parameter for parameter in self._parameters.values() if not parameter.requires_grad]

    def cut(self, shard: nn.Parameter, like: Tensor) -> dict[str, Span]:
        """One parameter by its canonical name: this rank's rows of ``like``, all of an ignored one, as a live span."""
        name = next(name for name, parameter in self._parameters.items() if parameter is shard)
        if not isinstance(shard, DTensor):
            return {name: self._left_out.span(like)}
        start = RowLayout([shard.shape], self.axis.size).elements(0, self.axis.rank).start
        return {name: Span(shard.shape, start, _local(like).view(-1))}

    def pieces(self) -> list[Piece]:
        """This rank's rows of the trainable parameters: units in forward order, root first, ignored ones last."""
        found = []
        for unit in self.units:
            for position, name in enumerate(unit.names):
                parameter = self._parameters[name]
                gradient = None if parameter.grad is None else _local(parameter.grad).reshape(-1)
                start = unit.layout.elements(position, self.axis.rank).start
                found.append(Piece(name, start, _local(parameter).reshape(-1), gradient))
        return found + self._left_out.pieces()

    def owned(self, name: str) -> slice:
        """The part of the flattened parameter that lies in this rank's rows; maybe empty.

        Of an ignored one, which lies on every rank, a part of its own for each.
        """
        if name in self._left_out.names:
            return self._left_out.share(name)
        unit = self._unit_of[name]
        return unit.layout.elements(unit.names.index(name), self.axis.rank)

    def in_root(self, name: str) -> bool:
        """Whether the parameter belongs to the root unit; an ignored one belongs to none."""
        return name in self.units[0].names

    def is_unit(self, module: nn.Module) -> bool:
        """Whether ``module`` is gathered and freed on its own."""
        return isinstance(module, FSDPModule)

    def full_values(self) -> dict[str, Tensor]:
        """Every parameter, whole and new, by canonical name. Communicates."""
        return self._whole({name: parameter.detach() for name, parameter in self._parameters.items()})

    def full_gradients(self) -> dict[str, Tensor]:
        """Every reduced gradient, whole and new; zeros before the first reduction. Communicates.

        Behind it not of a parameter that has none: no loss depends on it, on any rank.
        """
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        left = self._left_out
        reduced = {n: left.averaged.get(n) if n in left.names else p.grad for n, p in trainable.items()}
        found = {n: g for n, g in reduced.items() if g is not None}
        return self._whole(found or {n: torch.zeros_like(p) for n, p in trainable.items()})

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self._added[name] = self._added[name] + gradient if name in self._added else gradient

    def _reduce(self, unit: Unit) -> None:
        wholes = []
        for name, shape in zip(unit.names, unit.layout.shapes, strict=True):
            zeros = _local(self._parameters[name]).new_zeros(shape)
            added = self._added.pop(name, None)
            wholes.append(zeros if added is None else added.to(zeros.dtype))
        section = collectives.reduce_scatter_average(unit, unit.layout.pack(wholes), self.axis)
        section = collectives.all_reduce_average(unit, section, self.replicas)
        for name, rows in zip(unit.names, unit.layout.own(section, self.axis.rank), strict=True):
            parameter = self._parameters[name]
            gradient = _like(parameter, rows)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from DTensors, by one all-gather a dtype; copies of tensors that are whole."""
        whole = {name: tensor.detach().clone() for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        for dtype in dict.fromkeys(tensor.dtype for tensor in sharded.values()):
            chosen = {name: tensor for name, tensor in sharded.items() if tensor.dtype == dtype}
            layout = RowLayout([tensor.shape for tensor in chosen.values()], self.axis.size)
            own = layout.pack_own([_local(tensor) for tensor in chosen.values()])
            everyone = own.new_empty(self.axis.size * own.numel())
            collectives.all_gather(collectives.WHOLE, everyone, own, self.axis)
            whole.update(zip(chosen, (tensor.clone() for tensor in layout.whole(everyone)), strict=True))
        return {name: whole[name] for name in tensors}


def _forget_unreduced(unit: nn.Module) -> None:
    """Drop whole local gradients at the unit's next forward, where its whole parameters can be seen."""

    def forget(module: nn.Module, inputs: Any) -> None:
        hook.remove()
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad = None

    hook = unit.register_forward_pre_hook(forget)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local.detach()


def _like(parameter: nn.Parameter, rows: Tensor) -> Tensor:
    """``rows`` of this rank as a DTensor like ``parameter``."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
