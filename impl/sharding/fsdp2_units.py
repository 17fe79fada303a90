"""Units: what a ``fully_shard`` group holds of a model, what no group can hold, and how a module is made one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .parameter_slots import Slot, by_unit, parameter_at
from .row_layout import RowLayout


@dataclass(frozen=True)
class Unit:
    """The trainable parameters of one ``fully_shard`` group, by canonical name, and how their rows are split."""

    fqn: str
    names: list[str]
    layout: RowLayout


def refuse_ignored(
    ignored: Collection[str], places: Sequence[Sequence[Slot]], compute_dtype: torch.dtype | None
) -> None:
    """Raise ValueError for parameters that cannot be left out of sharding."""
    known = {uses[0].name: parameter_at(uses[0]) for uses in places}
    if unknown := sorted(set(ignored) - known.keys()):
        raise ValueError(f"got ignored parameters {unknown}, wanted some of {[*known]}: a tied one by its first name")
    for name in ignored:
        if not known[name].is_contiguous():
            raise ValueError(f"ignored parameter {name} has strides {known[name].stride()}: make it contiguous")
    if ignored and compute_dtype is not None:
        raise ValueError(
            f"got {len(ignored)} ignored parameters and compute_dtype {compute_dtype}: fully_shard casts only what it"
            " shards; compute in the parameters' own dtype, or shard them too"
        )


def units(
    module: nn.Module,
    unit_names: Sequence[str],
    places: Sequence[Sequence[Slot]],
    size: int,
    ignored: Collection[str],
) -> list[Unit]:
    """The root unit, then one a name in forward order, with their trainable parameters but for ``ignored`` ones."""
    found = []
    for unit_name, positions in by_unit(module, unit_names, places).items():
        owned = [places[position] for position in positions if places[position][0].name not in ignored]
        for uses in owned:
            _refuse_apart(uses, unit_names)
        trainable = [uses[0] for uses in owned if uses[0].module.get_parameter(uses[0].attribute).requires_grad]
        shapes = [slot.module.get_parameter(slot.attribute).shape for slot in trainable]
        found.append(Unit(unit_name or "(root)", [slot.name for slot in trainable], RowLayout(shapes, size)))
    return found


def _refuse_apart(uses: Sequence[Slot], unit_names: Sequence[str]) -> None:
    owners = {owner(slot.name, unit_names) for slot in uses}
    if len(owners) > 1:
        raise ValueError(
            f"parameter {uses[0].name} is used in {len(owners)} units ({', '.join(slot.name for slot in uses)}):"
            " fully_shard would untie it; put all of its uses into one unit"
        )
    if uses[0].module.get_parameter(uses[0].attribute).dim() == 0:
        raise ValueError(f"parameter {uses[0].name} has no first dim to shard: give it the shape [1]")


def owner(name: str, unit_names: Sequence[str]) -> str:
    """The innermost unit that holds the parameter; "" for the root."""
    return max((unit for unit in unit_names if name.startswith(f"{unit}.")), key=len, default="")


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    reshard_after_forward: bool,
    compute_dtype: torch.dtype | None,
    left_out: set[nn.Parameter],
) -> None:
    """``fully_shard``; with a dtype to compute in, gradients are reduced in that of the parameters."""
    policy = MixedPrecisionPolicy()
    own = next((parameter.dtype for parameter in module.parameters()), None)
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=own, cast_forward_inputs=False)
    fully_shard(
        module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy, ignored_params=left_out
    )
