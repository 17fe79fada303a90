"""What is written down of a call's tensors and of its reduction: plain data that all members must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""(dtype, shape) of each tensor; a sparse one says so before its dtype."""

_NAMES: dict[torch.dtype, str] = {}


def signature(tensors: Sequence[Tensor]) -> Signature:
    """Of tensors as they are."""
    return tuple((_NAMES.get(t.dtype) or _name(t.dtype), tuple(t.shape)) for t in tensors)


def sparse_signature(tensors: Sequence[Tensor]) -> Signature:
    """Of tensors that are sparse: how many elements one has is its rank's own affair."""
    return tuple((f"sparse {dtype}", shape) for dtype, shape in signature(tensors))


def packed_signature(packed: Sequence[Tensor], size: int) -> Signature:
    """Of flat tensors of ``size`` parts each: as if each part was a tensor."""
    parts = [(_NAMES.get(flat.dtype) or _name(flat.dtype), (flat.numel() // size,)) for flat in packed]
    return tuple(part for part in parts for _ in range(size))


def _name(dtype: torch.dtype) -> str:
    return _NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))


_REDUCE_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_REDUCE = {int(getattr(dist.ReduceOp, name)): name.lower() for name in _REDUCE_NAMES}
"""By number: torch makes a new object of an operation each time, and hashing one costs more than the rest."""
_PREMULTIPLIED = int(cast(Any, dist.ReduceOp).PREMUL_SUM)


def reduce_name(opts: Any) -> str:
    """The reduction that options ask for, in words; the usual one for none."""
    if opts is None:
        return "sum"
    factor = reduce_factor(opts)
    if factor is not None:
        return f"sum of {factor} times"
    op = getattr(opts.reduceOp, "op", opts.reduceOp)
    return _REDUCE.get(int(op)) or str(op)


def reduce_factor(opts: Any) -> float | None:
    """What PREMUL_SUM multiplies each term by; None for any other reduction."""
    op = getattr(opts, "reduceOp", None)
    if op is None or int(getattr(op, "op", op)) != _PREMULTIPLIED:
        return None
    return float(op.__getstate__()[1])
