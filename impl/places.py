"""Where a model holds its parameters: names that stay the same while sharding replaces the objects.

A *canonical name* is the first dotted name under which ``named_modules`` meets a parameter. A tied parameter has
several places and one canonical name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
