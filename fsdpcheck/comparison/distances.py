"""How far apart two runs are in an observable, and how large it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fsdpcheck.comparison.record import Key


class Distance(NamedTuple):
    """Of one observable of two runs.

    ``apart``: greatest difference of an entry, inf where only one run has a number. ``size``: largest entry of the
    two. ``entries``: how many there are.
    """

    apart: float
    size: float
    entries: int


def between(one: Mapping[Key, Tensor], other: Mapping[Key, Tensor]) -> dict[Key, Distance]:
    """Of every observable that either has. A gradient that is missing is one of zeros."""
    return {key: _of(key, one.get(key), other.get(key)) for key in dict.fromkeys((*one, *other))}


def _of(key: Key, one: Tensor | None, other: Tensor | None) -> Distance:
    if one is None or other is None:
        there = one if one is not None else other
        assert there is not None
        size = _largest(there)
        missing_is_zero = key.kind == "gradient"
        return Distance(size if missing_is_zero else math.inf, size, there.numel())
    if one.shape != other.shape:
        return Distance(math.inf, max(_largest(one), _largest(other)), one.numel())
    if not one.numel():
        return Distance(0.0, 0.0, 0)
    one, other = one.double(), other.double()
    size = max(_largest(one), _largest(other))
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (one - other).abs())
    return Distance(float(apart.nan_to_num(math.inf, posinf=math.inf).max()), size, one.numel())


def _largest(tensor: Tensor) -> float:
    finite = tensor.double().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
