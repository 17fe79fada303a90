"""A user's modules apart by rank: each rank imports its own copy of what lies outside site-packages, as a process does.

While ``RankModules.in_place`` is open, a finder in front of all others notes which names stand for a user's module, and
these entries of ``sys.modules`` are swapped at every hand-over. Ranks share extension modules, which cannot be loaded
twice, the standard library, torch, packages that are installed, and what was imported before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, Final

from fsdpcheck.compat import frames_private, import_private
from fsdpcheck.simulation.globals import Swap

_STANDARD: Final = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED: Final = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@functools.cache
def is_a_users(path: str) -> bool:
    """Whether a file or folder is neither Python's own, nor installed, nor torch's, nor the harness's.

    Remembered, for a process has thousands of modules, which each run asks for.
    """
    return _is_a_users(path) and _is_a_users(os.path.realpath(path) + os.sep)


def _is_a_users(path: str) -> bool:
    if any(part in path for part in _INSTALLED) or path.startswith(_STANDARD):
        return False
    return not (frames_private.is_torch(path) or frames_private.is_ours(path))


def loaded() -> tuple[list[ModuleType], list[str]]:
    """A user's modules that are imported by now, and the names of those of them that are C code."""
    found: dict[str, ModuleType] = {}
    for module in sys.modules.copy().values():
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and os.path.isabs(file) and is_a_users(file):
            found[module.__name__] = module
    native = [name for name, module in found.items() if _is_native(getattr(module, "__loader__", None))]
    return list(found.values()), native


PER_PROCESS: Final = frozenset({"hydra"})
"""Installed packages that ranks import each for itself too: of Python alone, with things that a process has one of."""


class RankModules:
    """The modules of W ranks. ``extensions``: names of a user's modules that all ranks share, for they are C code."""

    def __init__(
        self,
        rank: Callable[[], int | None],
        main: Callable[[int], ModuleType] | None = None,
        own: Iterable[str] = (),
    ) -> None:
        """``main(rank)`` makes the module that the rank knows as ``__main__``; None leaves that what it is.

        ``own``: installed packages that are treated as a user's, beside ``PER_PROCESS``.
        """
        self._rank, self._main, self._own = rank, main, PER_PROCESS.union(own)
        self._names: set[str] = {"__main__"} if main is not None else set()
        self.extensions: set[str] = set()

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """What ranks have apart."""
        return (
            Swap("modules", self._read, self._write, cheap=False, fresh=self._fresh),
            Swap(
                "locks of imports", import_private.locks, import_private.set_locks, cheap=False, fresh=lambda rank: {}
            ),
            Swap("sys.path", lambda: sys.path, _set_path, cheap=False, fresh=lambda rank: list(sys.path)),
            Swap("sys.argv", lambda: sys.argv, _set_argv, cheap=False, fresh=lambda rank: list(sys.argv)),
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, modules of a user's that ranks import are noted as theirs."""
        finder = _Finder(self)
        sys.meta_path.insert(0, finder)
        before = self._read()
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            self._write(before)

    def found(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        """A rank is about to import this module."""
        if self._rank() is None or not (name.partition(".")[0] in self._own or _is_of_a_user(spec)):
            return
        if _is_native(spec.loader):
            self.extensions.add(name)
        else:
            self._names.add(name)

    def _read(self) -> dict[str, ModuleType]:
        return {name: sys.modules[name] for name in self._names if name in sys.modules}

    def _write(self, modules: dict[str, ModuleType]) -> None:
        for name in self._names:
            if name in modules:
                sys.modules[name] = modules[name]
            else:
                sys.modules.pop(name, None)
            above, _, last = name.rpartition(".")
            if above in sys.modules and above not in self._names:
                _bind(vars(sys.modules[above]), last, modules.get(name))

    def _fresh(self, rank: int) -> dict[str, ModuleType]:
        return {} if self._main is None else {"__main__": self._main(rank)}


class _Finder(MetaPathFinder):
    """Finds what the finders behind it find, and lets the modules know."""

    def __init__(self, modules: RankModules) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in [other for other in sys.meta_path if other is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._modules.found(fullname, spec)
                return spec
        return None

    def invalidate_caches(self) -> None:
        """Nothing is cached here."""


def _is_of_a_user(spec: importlib.machinery.ModuleSpec) -> bool:
    places: Iterable[Any] = [spec.origin] if spec.has_location else spec.submodule_search_locations or ()
    return any(is_a_users(place) for place in places)


def _bind(names: dict[str, Any], name: str, module: ModuleType | None) -> None:
    """What a package that ranks share knows by the name of a part of it, which each imports for itself."""
    if module is not None:
        names[name] = module
    elif isinstance(names.get(name), ModuleType):
        del names[name]


def _is_native(loader: object) -> bool:
    return isinstance(loader, importlib.machinery.ExtensionFileLoader)


def _set_path(path: list[str]) -> None:
    sys.path = path


def _set_argv(words: list[str]) -> None:
    sys.argv = words
