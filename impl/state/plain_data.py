"""Plain data: what may lie in a file's header, compared without asking for one object identity or another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def check(value: object, where: str) -> None:
    """Raise TypeError, naming the place, unless ``value`` is None, number, text, bytes, tensor, or made of these."""
    if isinstance(value, dict):
        for key, entry in value.items():
            check(key, f"{where}, a key")
            check(entry, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        for position, entry in enumerate(value):
            check(entry, f"{where}[{position}]")
    elif not (value is None or type(value) in (bool, int, float, complex, str, bytes, Tensor)):
        raise TypeError(
            f"only plain data can be saved\n  got     {where} of type {type(value).__qualname__}\n"
            f"  wanted  None, numbers, text, bytes, tensors, and lists, tuples and dicts of these\n"
            f"  next    let state_dict() return these, and load_state_dict() build the rest from them"
        )


def difference(one: object, other: object, where: str = "") -> str:
    """The first place where two pieces of plain data differ, with both values; "" if they are equal, as NaN to NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return next(filter(None, (difference(one[key], other[key], f"{where}[{key!r}]") for key in one)), "")
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)), "")
    return "" if _same(one, other) else f"{where or 'all'}: {_shown(one)} and {_shown(other)}"


def _shown(value: object) -> str:
    """Bytes may be a key of noise, which belongs into no message."""
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)


def _same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))
    return one == other or (one != one and other != other)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)
