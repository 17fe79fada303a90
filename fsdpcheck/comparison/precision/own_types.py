"""Which type a script gave to a tensor that is raised: its random draws are made in that type."""

from __future__ import annotations

import os
import sys
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from fsdpcheck.comparison.precision.operators import Operator

_Weak: Final = cast(Any, reductions).StorageWeakRef
_USUAL: Final = torch.float32
_MANY: Final = 512


class OwnTypes:
    """Types by storage, of the tensors of one rank. Only what is not float32 is remembered."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, torch.dtype]] = {}
        self._many = _MANY

    def remember(self, tensor: Tensor, kind: torch.dtype) -> None:
        """``kind``: what the script believes it to be."""
        if kind is _USUAL or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = _Weak(storage), kind  # which keeps the address from another storage
        if len(self._known) > self._many:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._many = 2 * max(_MANY, len(self._known))

    def of(self, tensor: Tensor) -> torch.dtype:
        """A tensor of float64 that is not remembered is taken for one of float32."""
        if tensor.dtype is not torch.float64 or not self._known:
            return tensor.dtype if tensor.dtype is not torch.float64 else _USUAL
        known = self._known.get(tensor.untyped_storage()._cdata)
        return _USUAL if known is None else known[1]

    def asked(self, kind: torch.dtype) -> torch.dtype:
        """The type that the script means by one that it gives.

        Where it gives float64, it may have read that off a raised tensor: ``dtype=x.dtype``. It means float64 if that
        is its default, or if the function that gives it names it.
        """
        if kind is not torch.float64 or torch.get_default_dtype() is kind or _names_float64():
            return kind
        return _USUAL

    def requested(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
        """The type of what an operator makes that makes a new tensor, or casts one."""
        kind = kwargs.get("dtype")
        if isinstance(kind, torch.dtype):
            return self.asked(kind)
        if args and isinstance(args[0], Tensor):
            return self.of(args[0])
        return torch.get_default_dtype()


def _names_float64() -> bool:
    """Whether the code that called the operator has the name in it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return not _NAMES.isdisjoint(frame.f_code.co_names)


_NAMES: Final = frozenset(("float64", "double", "DoubleTensor"))
_BETWEEN: Final = (os.path.dirname(__file__), torch._ops.__file__)
