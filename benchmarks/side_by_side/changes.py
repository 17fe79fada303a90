"""Lines that faults alter, counted in code that alters none: a call stands before each, of all faults at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from tests.mechanisms.planting import Change, Mark, Mechanism


@contextmanager
def probed(faults: Iterable[Mechanism], ran: Callable[[str], object]) -> Iterator[None]:
    """For the length of a block ``ran`` is called with a fault's name each time before a line runs that it alters."""
    probes = defaultdict[FunctionType, list[tuple[Change, Mark]]](list)
    for fault in faults:
        for change in fault.changes:
            hit = f"_probe_of_{fault.name}"
            change.target.__globals__[hit] = lambda name=fault.name: ran(name)
            probes[change.target].append((change, (change.line, hit)))
    before = {function: function.__code__ for function in probes}
    for function, marked in probes.items():
        change = marked[0][0]
        code = change.compiled(change.source()[0], [mark for _, mark in marked])
        target: Any = function
        target.__code__ = code
    try:
        yield
    finally:
        for target, code in before.items():
            target.__code__ = code
