"""What the ranks of a program share, and real ranks do not: modules imported before they ran, arguments, C code."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, ModuleType
from typing import Any, Final

from fsdpcheck.simulation.programs import modules
from fsdpcheck.simulation.shared_state import SharedState

_EACH: Final = 16
"""Comparisons that each hand-over may cost; it takes as long as seven hundred (0.1 us each, and 70 us)."""
_AT_FIRST: Final = 20_000
"""Comparisons that looks may cost besides, at the program's own module and at all others: two milliseconds each."""
_EMPTY: Final = CellType()
_MOST: Final = 1024
"""Places that are looked at: to find them takes five milliseconds."""


class SharedByProgram:
    """Follows one run of several ranks of a program."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        """``roots``: objects that all ranks share, by what they are told as."""
        self._state = SharedState(_EACH, _MOST)
        loaded, self._native = modules.loaded()
        near = _near(roots.values(), loaded)
        others = [module for module in loaded if module not in near]
        self._state.begin([*near, *others], roots=roots, may_cost=_AT_FIRST, near=len(near))
        self.look = self._state.look

    def end(self) -> None:
        """Look once more, after the run."""
        self._state.end()

    @property
    def voids(self) -> Iterator[str]:
        """Why a run in which they wrote to it proves nothing of others."""
        if self._state.written:
            yield f"ranks wrote to what they share: {', '.join(self._state.written)}"

    def sentences(self, native: Iterable[str]) -> Iterator[str]:
        """What they share, a sentence each. ``native``: modules of C code that they have imported."""
        for name, who in self._state.written.items():
            yield f"ranks share {name}, and {who}; as on real ranks this would be each rank's own"
        for name in sorted({*self._native, *native}):
            yield f"ranks share the C code of {name}: as on real ranks only if it has no state"


def roots(program: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A program and its arguments, by what they are told as."""
    own = inspect.unwrap(program)
    placed = {f"args[{place}]": value for place, value in enumerate(args)}
    return {_name(own): own, **placed, **{f"kwargs[{name!r}]": value for name, value in kwargs.items()}}


def _near(roots: Iterable[Any], loaded: list[ModuleType]) -> list[ModuleType]:
    """The modules that ``roots`` were made in, and those that these, or variables around a function, have names of."""
    around = (getattr(root, "__closure__", None) or () for root in roots)
    homes = {*map(_home, roots), *(_home(cell.cell_contents) for cells in around for cell in cells if cell != _EMPTY)}
    named = {_home(value) for module in loaded if module in homes for value in list(vars(module).values())}
    return [module for module in loaded if module in homes or module in named]


def _home(value: Any) -> ModuleType | None:
    """The module that a value is, or that it or its class was made in."""
    name = getattr(value, "__module__", None)
    return value if isinstance(value, ModuleType) else sys.modules.get(name) if isinstance(name, str) else None


def _name(program: Any) -> str:
    while isinstance(program, functools.partial):
        program = program.func
    return str(getattr(program, "__qualname__", None) or type(program).__qualname__)
