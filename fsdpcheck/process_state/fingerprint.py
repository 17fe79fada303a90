"""Fingerprint: what torch and fsdpcheck were in a process before it imported a user's code, and what is another now.

Of fsdpcheck's own modules nothing may change that is a function or a class, nor the code of a function. Of torch, and
of what else a judge computes with, names are compared as in names.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

from fsdpcheck.process_state.names import Names

_OURS: Final = "fsdpcheck"


class Fingerprint:
    """Of this process as it is when this is made; modules that are loaded later are not known."""

    def __init__(self) -> None:
        self._names = Names(all_of_them=False)
        self._names.save()
        self._ours = _differing([home for home in _homes()])

    def changed(self) -> tuple[str, ...]:
        """What stands for something else now, a sentence each."""
        if ours := self._ours():
            return ours
        found = self._names.changes()
        if not found:
            self._names.look_for_more()
        return tuple(change.told() for change in found)


def _homes() -> Iterator[Any]:
    """Modules of fsdpcheck and the classes made in them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _OURS and isinstance(module, ModuleType):
            yield module
            yield from (made for made in vars(module).values() if isinstance(made, type) and made.__module__ == name)


def _differing(homes: list[Any]) -> Callable[[], tuple[str, ...]]:
    """What tells names of ``homes`` that stand for other functions or classes, or functions that have other code.

    It uses nothing that can be replaced by name.
    """
    named = [
        (vars(home), name, made, f"{home.__name__}.{name}")
        for home in homes
        for name, made in vars(home).items()
        if isinstance(made, FunctionType | type | property | staticmethod | classmethod)
    ]
    codes = [(made, made.__code__, path) for _, _, made, path in named if isinstance(made, FunctionType)]
    gone = object()

    def differing() -> tuple[str, ...]:
        found = [f"{path} replaced" for names, name, made, path in named if names.get(name, gone) is not made]
        found += [f"{path} has other code" for made, code, path in codes if made.__code__ is not code]
        return (*found,)

    return differing
