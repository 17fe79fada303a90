"""FakeTensorMode, and what is private of it. Tried: torch 2.13.0; read: 2.11.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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

    with replaced(torch.utils, swap_tensors=swap), mode:
        yield
