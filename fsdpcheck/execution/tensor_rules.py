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

from fsdpcheck.errors import NotSupported

AS_MEMORY = frozenset({"all_reduce", "reduce", "broadcast", "scatter"})
"""Operations that take a tensor for the elements behind its address."""


GLOO_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    }
)
"""What gloo's collectives move, complex numbers aside. Tried: 2.13.0."""


def require_scalars_of_gloo(op: str, tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError for what gloo does not take: a message may have any dtype, all but gather complex ones."""
    for tensor in tensors:
        if tensor.dtype not in GLOO_DTYPES and not (tensor.is_complex() and op != "gather"):
            _refuse(op, f"{_form(tensor)}: Invalid scalar type", "a dtype that gloo moves")


def require_dense(op: str, tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError if ``op`` would read or write a tensor with gaps, whose elements overlap, or a sparse one."""
    for tensor in tensors:
        if tensor.is_sparse and op != "all_reduce":
            _refuse(op, f"a sparse tensor, {_form(tensor)}", "a dense one: all_reduce alone takes sparse ones")
    if op not in AS_MEMORY:
        return
    for tensor in tensors:
        if not tensor.is_sparse and not tensor.is_contiguous() and not _is_dense(tensor):
            _refuse(op, f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}", "no gaps in it")


def require_contiguous(op: str, *tensors: Tensor) -> None:
    """Raises ValueError for a tensor that is not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            got = f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            raise ValueError(f"{op} cannot be called like this: Tensors must be contiguous\n  got     {got}")


def require_pieces(op: str, pieces: Sequence[Tensor], own: Tensor, ranks: int, place: int | None = None) -> None:
    """Raises RuntimeError unless there is one piece a rank, each of the shape and dtype of ``own``.

    ``place``: that of the one piece which must have its shape; None for all.

    To reduce, gloo lines up transposed pieces in an order that is neither theirs nor that of memory.
    """
    if op == "reduce_scatter":
        for tensor in (*pieces, own):
            if not tensor.is_contiguous() and _is_dense(tensor):
                _refuse(op, f"a list with a transposed tensor of shape {list(tensor.shape)}", "contiguous tensors")
    if len(pieces) != ranks:
        _refuse(op, f"a list of {len(pieces)} tensors", f"one a rank, {ranks}")
    for number, piece in enumerate(pieces):
        if piece.dtype != own.dtype or (piece.shape != own.shape and place in (None, number)):
            _refuse(op, f"{_form(piece)} in the list", f"the form of the single tensor, {_form(own)}")


def require_a_rank(op: str, ranks: int, *lists: Sequence[Tensor]) -> None:
    """Raises RuntimeError unless each list has a tensor a rank."""
    for tensors in lists:
        if len(tensors) != ranks:
            _refuse(op, f"a list of {len(tensors)} tensors", f"one a rank, {ranks}")


def require_stacked(op: str, large: Tensor, small: Tensor, ranks: int) -> None:
    """Raises RuntimeError unless ``large`` is made of parts of the shape of ``small`` along its first dimension."""
    parts = large.chunk(ranks) if large.dim() else ()
    if len(parts) != ranks or any(part.shape != small.shape for part in parts):
        _refuse(op, f"{_form(large)} beside {_form(small)}", f"{ranks} parts of that shape along the first dimension")


def require_alike(op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raises RuntimeError unless all are of one shape and dtype."""
    for tensor in (*outputs, *inputs):
        if tensor.shape != outputs[0].shape or tensor.dtype != outputs[0].dtype:
            _refuse(op, f"{_form(tensor)} beside {_form(outputs[0])}", "one form for all, as gloo wants it")


def require_multiple(op: str, large: Tensor, small: Tensor, ranks: int) -> None:
    """Raises RuntimeError unless ``large`` has the elements of ``ranks`` times ``small``, in its dtype."""
    if large.numel() != ranks * small.numel() or large.dtype != small.dtype:
        _refuse(op, f"{_form(large)} beside {_form(small)}", f"{ranks} times as many elements, in the same dtype")


def require_member(rank: int, ranks: int) -> None:
    """Raises RuntimeError unless a group of so many ranks has this one."""
    if not 0 <= rank < ranks:
        _refuse("a call of a group", f"an invalid root rank: {rank}", f"0 to {ranks - 1}")


def require_one(op: str, tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError for a list without tensors, NotSupported for several: to gloo they are of several GPUs."""
    if not tensors:
        _refuse(op, "an empty list", "a tensor: the call requires non-empty tensor lists")
    if len(tensors) > 1:
        raise NotSupported(
            f"{op} of several tensors at once is not offered: gloo takes them for those of several GPUs of one rank\n"
            f"  got     {', '.join(map(_form, tensors))}\n  wanted  one tensor\n"
            f"  next    make a call for each, or use {op}_coalesced"
        )


def as_memory(tensor: Tensor) -> Tensor:
    """``tensor``, which has no gaps, with its elements in the order of memory; a view of the same shape."""
    if tensor.is_sparse or tensor.is_contiguous() or not _is_dense(tensor):
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
