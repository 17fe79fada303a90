"""Casting a model: real parameters and buffers to a dtype, complex buffers to the complex numbers of that."""

from __future__ import annotations

from typing import Final, TypeVar

import torch
from torch import nn

_Model = TypeVar("_Model", bound=nn.Module)
_COMPLEX: Final = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def cast(model: _Model, dtype: torch.dtype) -> _Model:
    """``model`` in float32 or float64, in place. ``Module.to`` would drop the imaginary parts of complex buffers, which
    tables of rotary embeddings are; also those that several modules share."""
    buffers = model.named_buffers(remove_duplicate=False)
    kept = {name: buffer for name, buffer in buffers if buffer.is_complex()}
    for name, buffer in kept.items():
        _set(model, name, buffer.new_zeros(0).real)
    model.to(dtype)
    for name, buffer in kept.items():
        _set(model, name, buffer.to(_COMPLEX.get(dtype, buffer.dtype)))
    return model


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)
