"""Widening: dtypes that a user's model names, computed in float64 where the rest of the model is.

The judge computes in float64 what ranks compute in float32. A model that names a dtype, by ``x.float()`` say, would
round there, as the judge must not, or meet a weight of another dtype. Where every value is proved to fit the dtype that
is named (oracle/certificate.py), both are one number.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.case import UserModelSpec
from fsdpcheck.compat import torch_private
from fsdpcheck.exact import wider_dtype

_WIDENED = (torch.float32, torch.bfloat16)


def widened(own: UserModelSpec, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Where ``own`` names a dtype and computes in ``dtype`` float64, what asks for a narrower one is given float64."""
    return _Widened() if own.names and dtype == torch.float64 else nullcontext()  # type: ignore[no-untyped-call]


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts to a narrow dtype inside are casts to float64; constants that are made in one are taken to float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = any(value is torch.float32 for value in (kwargs or {}).values())
        asked = {name: torch.float64 if value in _WIDENED else value for name, value in (kwargs or {}).items()}
        with wider_dtype.named() if named else nullcontext():
            return _wide(func(*args, **asked))


def _wide(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_wide, value))
    if not isinstance(value, Tensor) or value.dtype not in _WIDENED:
        return value
    with torch_private.without_modes():  # no computation of the model's own, which a certifier would look at
        return value.double()
