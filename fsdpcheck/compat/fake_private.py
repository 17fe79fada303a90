"""FakeTensorMode, and what is private of it. Tried: torch 2.13.0; read: 2.11.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d

from fsdpcheck.compat.tensors_private import is_fake
from fsdpcheck.compat.torch_private import replaced


@contextmanager
def without_values(forget: Callable[[], object]) -> Iterator[None]:
    """While open, tensors that this thread makes are fake.

    ``nn.Module.to`` swaps fake parameters with converted ones, and torch refuses that for a tensor to which there are
    weak references: the mode has some to each, and ``forget`` drops those of others.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real: Callable[[Any, Any], None] = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        forget()
        real(one, other)

    with (
        replaced(torch.utils, swap_tensors=swap),
        replaced(torch, save=_refuse_to_save),
        replaced(torch.Tensor, __format__=_formatted(torch.Tensor.__format__)),
        replaced(
            distributed_c10d,
            _object_to_tensor=_real(distributed_c10d._object_to_tensor),
            _tensor_to_object=_real(distributed_c10d._tensor_to_object),
        ),
        mode,
    ):
        yield


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """With values: an object is pickled into bytes."""

    def ours(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **options)

    return ours


def _formatted(real: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
    """Of a number what is made up for it, as ``item`` gives it."""

    def ours(tensor: Any, form: str) -> str:
        return (
            format(tensor.item(), form)
            if is_fake(cast(Any, type(tensor))) and tensor.dim() == 0
            else real(tensor, form)
        )

    return ours


def _refuse_to_save(*args: Any, **options: Any) -> None:
    """Raises NotImplementedError, before a file that is there is lost."""
    raise NotImplementedError(
        "torch.save of tensors that have no values; next: leave the checkpoint out, or give them values"
    )
