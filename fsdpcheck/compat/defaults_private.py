"""Defaults that torch evaluates when a module of its own is imported, once for all ranks of a process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fsdpcheck.compat import frames_private, torch_private


@contextmanager
def no_group_at_import(rank: Callable[[], int | None]) -> Iterator[None]:
    """While open, a module of torch that a rank imports finds no default group: its defaults mean that of the caller.

    ``def all_reduce(tensor, group=group.WORLD)`` of torch.distributed.nn would be the group of the rank that imports it
    first, and that one module is all ranks'. Tried: 2.13.0.
    """
    meta: Any = type(dist.group)
    real = meta.WORLD

    def world(cls: Any) -> Any:
        code = sys._getframe(1).f_code
        if (
            not code.co_flags & inspect.CO_OPTIMIZED
            and frames_private.is_torch(code.co_filename)
            and rank() is not None
        ):
            return None  # no function, but the body of a module or a class
        return real.fget(cls)

    with torch_private.replaced(meta, WORLD=property(world, real.fset)):
        yield
