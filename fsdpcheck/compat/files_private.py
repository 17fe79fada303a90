"""What torch writes to files by C++, of which Python tells nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from fsdpcheck.compat.torch_private import replaced


@contextmanager
def archives_written(tell: Callable[[str], object]) -> Iterator[None]:
    """While open, ``tell`` is called with each path that torch.save is about to write. Tried: 2.13.0."""
    home = cast(Any, torch)._C
    real = home.PyTorchFileWriter

    def write(file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(file, str):
            tell(file)
        return real(file, *args, **options)

    with replaced(home, PyTorchFileWriter=write):
        yield
