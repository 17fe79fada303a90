"""Installs: context managers by dotted name, in place in one process for the length of a run, counting their hits.

An install is "pkg.mod:attr"; calling it gives a context manager. Its value, or the install itself, has an int attribute
``hits`` that says how often the patched code ran.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fsdpcheck.errors import UsageError


class Hits:
    """Reads the hit counters of what is installed."""

    def __init__(self, counters: dict[str, Any]) -> None:
        self._counters = counters

    def read(self) -> dict[str, int]:
        return {name: int(counter.hits) for name, counter in self._counters.items()}


@contextmanager
def installed(names: Sequence[str]) -> Iterator[Hits]:
    """Put every install in place, in order, and take them out in reverse. Raises UsageError for a name that is none."""
    with ExitStack() as stack:
        counters = {}
        for name in names:
            factory = _resolve(name)
            value = stack.enter_context(factory())
            counters[name] = value if hasattr(value, "hits") else factory
        yield Hits(counters)


def check(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no install, without putting anything in place."""
    for name in names:
        _resolve(name)


def _resolve(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"there is no install {name!r}\n  got     {error}\n  wanted  'pkg.mod:attr' of a context manager factory\n"
            f"  next    `fsdpcheck list faults` shows the planted faults"
        ) from error
