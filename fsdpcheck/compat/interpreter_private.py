"""Where the interpreter keeps its own state: its lock above all, for which threads wait at every turn of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def memory() -> range:
    """The addresses of the interpreter's own variables; none where that cannot be known. Tried: CPython 3.11."""
    try:
        state = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        first, end = 0, 0
        for low, high in _writable():
            if low <= state < high:
                first, end = low, high
            elif low == end:  # what has no first value lies behind
                end = high
    except (OSError, ValueError):  # another interpreter, or a system that does not tell
        return range(0)
    return range(first, end)


def _writable() -> Iterator[tuple[int, int]]:
    """The parts of this process's memory that can be written, the heap aside, in order."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, mode = line.split()[:2]
        if mode.startswith("rw") and not line.endswith("[heap]"):
            low, high = where.split("-")
            yield int(low, 16), int(high, 16)
