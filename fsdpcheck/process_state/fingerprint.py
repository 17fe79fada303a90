"""Fingerprint: what torch and fsdpcheck were in a process before it imported a user's code, and what is another now.

Of fsdpcheck's own modules nothing may change that is a function or a class, nor the code of a function. Of torch, and
of what else a judge computes with, names are compared as in names.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any, Final

from fsdpcheck.process_state.names import Names

_WATCHED: Final = (FunctionType, type, property, staticmethod, classmethod)
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
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] == _OURS and isinstance(module, ModuleType):
            yield module
            yield from (made for made in vars(module).values() if isinstance(made, type) and made.__module__ == name)


def _differing(homes: list[Any]) -> Callable[[], tuple[str, ...]]:
    """What tells names of ``homes`` that stand for other functions or classes, or functions that have other code.

    It uses nothing that can be replaced by name.
    """
    spaces = []
    for home in homes:
        view = vars(home)
        kept = {name: made for name, made in view.items() if isinstance(made, _WATCHED)}
        if kept:
            functions = [made for made in kept.values() if isinstance(made, FunctionType)]
            codes = [made.__code__ for made in functions]
            spaces.append((home.__name__, view, itemgetter(*kept), itemgetter(*kept)(view), kept, functions, codes))
    gone = object()

    missing, pairs = KeyError, zip

    def differing() -> tuple[str, ...]:
        found: list[str] = []
        for home, view, read, values, kept, functions, codes in spaces:
            try:
                is_as_it_was = read(view) == values
            except missing:
                is_as_it_was = False
            if not is_as_it_was:
                found += [f"{home}.{name} replaced" for name in kept if view.get(name, gone) is not kept[name]]
            if [made.__code__ for made in functions] != codes:
                those = pairs(functions, codes, strict=True)
                found += [f"{home}.{made.__name__} has other code" for made, code in those if made.__code__ != code]
        return (*found,)

    return differing
