"""Locks that the code on a stack names: what a thread holds or waits for is among them, as far as it can be known."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from fsdpcheck.simulation.program_locks import ProgramLock

RLOCK: Final = type(threading.RLock())
OF_PYTHON: Final = (type(threading.Lock()), RLOCK)
LOCKS: Final = (*OF_PYTHON, ProgramLock)


def is_taken(lock: Any) -> bool:
    return not repr(lock).startswith("<unlocked ")


def named(frame: FrameType | None) -> Iterator[Any]:
    """What the names that occur in a frame's code are bound to: locals, globals, and attributes of these."""
    if frame is None:
        return
    names = frame.f_code.co_names
    values = [*frame.f_locals.values(), *(frame.f_globals[name] for name in names if name in frame.f_globals)]
    yield from values
    for value in values:
        for name in names:
            with suppress(Exception):
                found = inspect.getattr_static(value, name)
                yield found if not inspect.isdatadescriptor(found) else None
