"""Notes of a rank: what is reported and not judged, with the line of the script; and what the rank is doing."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fsdpcheck.execution import call_sites


class _Here(threading.local):
    """Of one thread. ``counted``: where its notes go; None in no arithmetic. ``raised``: whether its floats are.

    ``casting``: whether a module is being cast. ``batch_statistics``: whether BatchNorm may use them.
    """

    counted: Counter[str] | None = None
    raised: bool = False
    casting: bool = False
    batch_statistics: bool = True


_here = _Here()


@contextmanager
def taken(counted: Counter[str], *, raised: bool, batch_statistics: bool = True) -> Iterator[None]:
    """While open, notes of this thread are counted there, and it is in an arithmetic."""
    before = _here.counted, _here.raised, _here.batch_statistics
    _here.counted, _here.raised, _here.batch_statistics = counted, raised, batch_statistics
    try:
        yield
    finally:
        _here.counted, _here.raised, _here.batch_statistics = before


def are_taken() -> bool:
    """Whether this thread is in an arithmetic."""
    return _here.counted is not None


def is_raised() -> bool:
    """Whether this thread computes in float64 in place of lower types."""
    return _here.raised


def is_without_batch_statistics() -> bool:
    """Whether BatchNorm on this thread is to compute by its running averages."""
    return not _here.batch_statistics


def is_casting_module() -> bool:
    """Whether ``module.to(...)`` or its like is at work on this thread."""
    return _here.casting


@contextmanager
def casting_module() -> Iterator[None]:
    """While open, it is."""
    before, _here.casting = _here.casting, True
    try:
        yield
    finally:
        _here.casting = before


def note(what: str) -> None:
    """Count it, with the line of the script that this thread is at."""
    if _here.counted is not None:
        line = call_sites.line_text(call_sites.line_of(sys._getframe(1)))
        _here.counted[f"{what} at {line or 'an unknown place'}"] += 1


def _is_own(frame: FrameType) -> bool:
    """Whether it runs code of the script, and not torch's or the harness's."""
    line = call_sites.line_of(frame)
    return line is not None and line[0] is frame.f_code


_OF_TYPES = ("dtype", "float", "double", "half", "precision", "scalar type")


def note_refusal(error: Exception) -> None:
    """Note an error that a script may have raised because it saw float64 where it expects another type."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__) if _is_own(frame)]
    line = lines[-1] if lines else None
    text = str(error).strip().partition("\n")[0]
    source = linecache.getline(line[0].co_filename, line[1]) if line is not None else ""
    if _here.counted is not None and any(word in (text + source).lower() for word in _OF_TYPES):
        said = f": {text}" if text else ""
        where = call_sites.line_text(line) or "an unknown place"
        _here.counted[f"float64 in place of its type was refused, {type(error).__name__}{said} at {where}"] += 1
