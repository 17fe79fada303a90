"""What the tensors of one call must be like: what gloo refuses, or takes and gets wrong, is refused here with words.

Operations in AS_MEMORY move exactly the ``numel`` elements behind a tensor's address, so that a tensor with gaps (a
column, every second element) is read and written at the wrong places, and a transposed one is only right if it is
transposed on every rank. NCCL refuses tensors with gaps. Each sentence was tried on gloo of
torch 2.13; ``tests/engines/test_agreement.py`` holds both engines to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AS_MEMORY = frozenset({"all_reduce", "reduce", "broadcast", "scatter"})
"""Operations that take a tensor for the elements behind its address."""


def require_dense(op: str, tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError if ``op`` would read or write a tensor with gaps, or one whose elements overlap."""
    if op not in AS_MEMORY:
        return
    for tensor in tensors:
        if not tensor.is_contiguous() and not _is_dense(tensor):
            _refuse(op, f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}", "no gaps in it")


def require_contiguous(op: str, *tensors: Tensor) -> None:
    """Raises RuntimeError for a tensor that is not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            got = f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            _refuse(op, got, "a contiguous tensor")


def require_pieces(op: str, pieces: Sequence[Tensor], own: Tensor, ranks: int) -> None:
    """Raises RuntimeError unless there is one piece a rank, each of the shape and dtype of ``own``.

    To reduce, gloo lines up transposed pieces in an order that is neither theirs nor that of memory.
    """
    if op == "reduce_scatter":
        for tensor in (*pieces, own):
            if not tensor.is_contiguous() and _is_dense(tensor):
                _refuse(op, f"a list with a transposed tensor of shape {list(tensor.shape)}", "contiguous tensors")
    if len(pieces) != ranks:
        _refuse(op, f"a list of {len(pieces)} tensors", f"one a rank, {ranks}")
    for piece in pieces:
        if piece.shape != own.shape or piece.dtype != own.dtype:
            _refuse(op, f"{_form(piece)} in the list", f"the form of the single tensor, {_form(own)}")


def require_multiple(op: str, large: Tensor, small: Tensor, ranks: int) -> None:
    """Raises RuntimeError unless ``large`` has the elements of ``ranks`` times ``small``, in its dtype."""
    if large.numel() != ranks * small.numel() or large.dtype != small.dtype:
        _refuse(op, f"{_form(large)} beside {_form(small)}", f"{ranks} times as many elements, in the same dtype")


def as_memory(tensor: Tensor) -> Tensor:
    """``tensor``, which has no gaps, with its elements in the order of memory; a view of the same shape."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tensor
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.detach().as_strided(tensor.shape, strides)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory from the first to the last, once each, in whatever order."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse(op: str, got: str, wanted: str) -> None:
    raise RuntimeError(f"{op} cannot be called like this\n  got     {got}\n  wanted  {wanted}")
