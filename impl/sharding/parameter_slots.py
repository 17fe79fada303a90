"""Where a model holds its parameters: names that stay the same while sharding replaces the objects.

A *canonical name* is the first dotted name under which ``named_modules`` meets a parameter. A tied parameter has
several places and one canonical name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a parameter. A tied parameter has several."""

    module: nn.Module
    attribute: str
    name: str


def parameter_at(slot: Slot) -> nn.Parameter:
    """The parameter that a slot holds."""
    parameter = slot.module._parameters[slot.attribute]
    assert parameter is not None
    return parameter


def shared_slots(module: nn.Module) -> list[list[Slot]]:
    """All places of each parameter, parameters in canonical order; more than one place means that it is tied."""
    places: dict[int, list[Slot]] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                places.setdefault(id(parameter), []).append(Slot(child, attribute, name))
    return list(places.values())


def refuse_sharded(module: nn.Module) -> None:
    """Raise ValueError if something of ``module`` is sharded already, also where ``fully_shard`` has left it alone."""
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            raise ValueError(
                f"module {name or '(root)'} is sharded already, by fully_shard: give the model as it was before, and"
                " name its units here, and by PerParameterModel(..., ignored=...) what is to be left out of sharding:"
                " what another ignored_params leaves out would be neither averaged nor clipped with the others"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"parameter {name} is a DTensor already: give the model as it was before it was sharded")


@dataclass(frozen=True)
class Placed:
    """A parameter as it was put into its slot when its model was sharded."""

    slot: Slot
    parameter: nn.Parameter
    requires_grad: bool
    dtype: torch.dtype


def placed(places: Sequence[Sequence[Slot]]) -> list[Placed]:
    """What all places hold now."""
    found = [(slot, parameter_at(slot)) for uses in places for slot in uses]
    return [Placed(slot, parameter, parameter.requires_grad, parameter.dtype) for slot, parameter in found]


def change(module: nn.Module, held: Sequence[Placed]) -> str:
    """What was done to the parameters of ``module`` since they were ``held``, with the way out; "" if nothing was.

    Seen: a parameter that was replaced, removed, added (also with a layer), frozen, thawed or given another dtype. Not
    seen: values written into a parameter, which lie in its shards or, while it is freed, nowhere.
    """
    for one in held:
        name, now = one.slot.name, one.slot.module._parameters.get(one.slot.attribute)
        if now is not one.parameter:
            return f"parameter {name} was replaced after sharding: change it before wrapping"
        if now.requires_grad != one.requires_grad:
            return _of_flag(one, now)
        if now.dtype != one.dtype:
            return (
                f"parameter {name} was {one.dtype} when it was sharded and is now {now.dtype}: convert the module"
                " before wrapping, or compute in another dtype with compute_dtype"
            )
    known = {(id(one.slot.module), one.slot.attribute) for one in held}
    for prefix, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None and (id(child), attribute) not in known:
                name = f"{prefix}.{attribute}" if prefix else attribute
                return f"parameter {name} was added after sharding: build the whole module before wrapping"
    return ""


def flag_of_gathered(held: Sequence[Placed]) -> str:
    """As ``change``, of the ``requires_grad`` of parameters that stand in the places of those ``held``.

    Whoever gathers parameters by putting others there frees them with the flags that their user has set.
    """
    for one in held:
        now = one.slot.module._parameters.get(one.slot.attribute)
        if now is not None and now.requires_grad != one.requires_grad:
            return _of_flag(one, now)
    return ""


def _of_flag(one: Placed, now: nn.Parameter) -> str:
    return (
        f"requires_grad of {one.slot.name} was {one.requires_grad} when it was sharded and is now {now.requires_grad}:"
        " freeze and unfreeze before wrapping"
    )


Initial = Callable[[str, torch.Size], Tensor]
"""The whole value of a parameter, by canonical name and shape: equal on all ranks."""


def materialise(places: Sequence[Sequence[Slot]], initial: Initial | None) -> None:
    """Replace parameters on the meta device, in all of their places, by ones with ``initial`` values.

    Raises ValueError if there are such parameters and no ``initial``, or if a value has another shape.
    """
    for uses in places:
        parameter = parameter_at(uses[0])
        if not parameter.is_meta:
            continue
        name = uses[0].name
        if initial is None:
            raise ValueError(f"parameter {name} is on the meta device: give its values by initial(name, shape)")
        value = initial(name, parameter.shape)
        if value.shape != parameter.shape:
            raise ValueError(f"initial({name!r}) gave {tuple(value.shape)}, wanted {tuple(parameter.shape)}")
        made = nn.Parameter(value.to(parameter.dtype), requires_grad=parameter.requires_grad)
        for slot in uses:
            slot.module._parameters[slot.attribute] = made


def innermost(names: Sequence[str], uses: Sequence[Slot]) -> str:
    """The longest of ``names`` that contains all uses; "" contains everything."""
    found = ""
    for name in names:
        if len(name) > len(found) and all(slot.name.startswith(f"{name}.") for slot in uses):
            found = name
    return found


def by_unit(module: nn.Module, unit_names: Sequence[str], places: Sequence[Sequence[Slot]]) -> dict[str, list[int]]:
    """Positions in ``places`` of the parameters of the root ("") and of each unit, in forward order.

    A parameter belongs to the innermost unit that contains all of its uses. Raises KeyError for an unknown module.
    """
    known = {name for name, _ in module.named_modules(remove_duplicate=False)}
    names = ["", *unit_names]
    if unknown := sorted(set(names) - known):
        raise KeyError(f"no modules named {unknown} to shard; there are {sorted(known)}")
    found: dict[str, list[int]] = {name: [] for name in names}
    for position, uses in enumerate(places):
        found[innermost(names, uses)].append(position)
    return found
