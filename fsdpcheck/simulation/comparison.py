"""What ranks return under one order against what they return under the first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fsdpcheck.execution import Failure
from fsdpcheck.simulation.simulate import Simulation


def compared(first: Simulation, done: Simulation) -> Simulation:
    """``done``, failed if its ranks have returned something else than those of the first order did."""
    if first is done or done.failure is not None or first.failure is not None:
        return done
    for rank, (one, other) in enumerate(zip(first.returned, done.returned, strict=True)):
        if not _equal(one, other):
            text = (
                f"order: what rank {rank} returns depends on the order of ranks\n"
                f"  first order    {_short(one)}\n  this order     {_short(other)}"
            )
            return replace(done, failure=Failure("order", text))
    return done


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    says_nothing = type(one).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    return says_nothing or bool(one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
