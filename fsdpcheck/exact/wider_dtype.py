"""What a model computes in a wider dtype, that it names, where the rest of it computes in few bits.

RMSNorm and rotary embeddings are often computed in float32 within a model in bfloat16. A certifier computes all of it
in float64, where casts to a wider dtype and back cannot be told apart by dtypes. So it is followed which tensors are of
the wider dtype: what a cast to it by name gives (``named``), buffers, which mixed precision leaves as they are, and
what is made of such alone. A tensor of which this is not known counts as one of few bits, in which more is rounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CASTS: Final = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.bfloat16, Tensor.half)


class _Named(threading.local):
    inside = 0


_named = _Named()


@contextmanager
def named() -> Iterator[None]:
    """Inside, what is computed is a cast, or constants, in the wider dtype, for which the model asks by its name."""
    _named.inside += 1
    try:
        yield
    finally:
        _named.inside -= 1


class Wider:
    """The tensors of a computation that are of the wider dtype."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> None:
        """By storage, which views of it share; so the tensor is kept alive."""
        self._known[tensor.untyped_storage().data_ptr()] = tensor

    def drop(self, tensor: Tensor) -> None:
        """It is cast back, or may be."""
        self._known.pop(tensor.untyped_storage().data_ptr(), None)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is of the wider dtype."""
        return tensor.untyped_storage().data_ptr() in self._known

    def computes(self, operands: Sequence[Any]) -> bool:
        """Whether an operator on these computes in it. Of tensors with dims those without have no say, as in torch."""
        if _named.inside:
            return True
        tensors = [value for value in _flat(operands) if isinstance(value, Tensor) and value.is_floating_point()]
        deciding = [value for value in tensors if value.dim()] or tensors
        return bool(deciding) and all(map(self.holds, deciding))

    def remember(self, result: Any) -> None:
        """What an operator gave that computes in it."""
        for value in _flat([result]):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.add(value)


class Casts(TorchFunctionMode):
    """Sees casts that change nothing in float64: what they give back is rounded to few bits, or may be.

    ``rounded``: called with it. One to the dtype of a tensor that is of the wider dtype does not round, nor does one to
    a device.
    """

    def __init__(self, wider: Wider, rounded: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._wider, self._rounded = wider, rounded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and result is args[0] and self._may_round(func, [*args[1:], *(kwargs or {}).values()]):
            self._wider.drop(result)
            self._rounded(result)
        return result

    def _may_round(self, func: Any, asked: Sequence[Any]) -> bool:
        if like := [one for one in asked if isinstance(one, Tensor)]:
            return not all(map(self._wider.holds, like))
        return func is not Tensor.to or any(isinstance(one, torch.dtype) for one in asked)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
