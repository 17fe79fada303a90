"""Tensors in what layers are given and give: nested tuples, lists and dicts."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
