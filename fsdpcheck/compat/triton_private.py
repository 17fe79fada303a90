"""Everything of Triton that has no public name: whether kernels are interpreted, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SWITCH = "TRITON_INTERPRET"
"""Environment variable that decides, when Triton is imported, whether its kernels are interpreted."""


@contextmanager
def reversed_grid() -> Iterator[None]:
    """Interpreted programs of a launch run in the opposite order, along every axis of the grid."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # no kernel of Triton was used so far in this process
        yield
        return
    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx

    def turned(*place: int) -> None:
        original(*(extent - 1 - index for extent, index in zip(builder.grid_dim, place, strict=True)))

    builder.set_grid_idx = turned
    try:
        yield
    finally:
        del builder.set_grid_idx
