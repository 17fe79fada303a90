"""Random draws of a raised run: made in the type of the script, then cast, so that they are the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdpcheck.comparison.precision.notes import note
from fsdpcheck.comparison.precision.operators import WIDE, Operator
from fsdpcheck.comparison.precision.own_types import OwnTypes


def drawn(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], own: OwnTypes) -> Any:
    """What the operator draws, in float64; the generator is left as the script's own run leaves it."""
    if 0 in operator.written and isinstance(args[0], Tensor):
        return _into(operator, args, kwargs, own)
    if operator.name.startswith("aten.normal.") and any(isinstance(value, Tensor) for value in args):
        return _normal(args, kwargs, own)
    if isinstance(kind := kwargs.get("dtype"), torch.dtype):
        kwargs = {**kwargs, "dtype": own.asked(kind)}
    elif operator.types and "dtype" not in kwargs and args and isinstance(args[0], Tensor):
        kwargs = {**kwargs, "dtype": own.of(args[0])}  # rand_like and its like
    elif operator.base not in ("bernoulli", "multinomial") and any(isinstance(value, Tensor) for value in args):
        note(f"low precision entered {operator.name}")  # what is drawn follows its parameter continuously
    return _wide(operator.func(*_own(args, own), **_own_options(kwargs, own)))


def _into(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], own: OwnTypes) -> Tensor:
    """A draw in place. Memory is laid out alike, because the order of draws follows it."""
    target: Tensor = args[0]
    kind = own.of(target)
    if kind is target.dtype or not target.is_floating_point():
        operator.func(*_own(args, own), **_own_options(kwargs, own))
        return target
    made = torch.empty_strided(target.shape, target.stride(), dtype=kind, device=target.device)
    operator.func(made, *_own(args[1:], own), **_own_options(kwargs, own))
    return target.copy_(made)


def _normal(args: tuple[Any, ...], kwargs: dict[str, Any], own: OwnTypes) -> Tensor:
    """Of computed means and deviations: standard draws in the type of the script, the rest in float64."""
    mean, deviation = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    first = mean if isinstance(mean, Tensor) else deviation
    shape = (mean + deviation).shape
    standard = torch.empty(shape, dtype=own.of(first), device=first.device)
    standard.normal_(generator=kwargs.get("generator"))
    wide: Tensor = _wide(mean) + _wide(deviation) * standard.double()
    return wide


def _own(args: tuple[Any, ...], own: OwnTypes) -> list[Any]:
    return [_of_own(value, own) for value in args]


def _own_options(kwargs: dict[str, Any], own: OwnTypes) -> dict[str, Any]:
    return {name: _of_own(value, own) for name, value in kwargs.items()}


def _of_own(value: Any, own: OwnTypes) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(own.of(value))
    return value


def _wide(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.to(WIDE.get(result.dtype, result.dtype))
    if isinstance(result, tuple | list):
        return type(result)(_wide(inner) for inner in result)
    return result
