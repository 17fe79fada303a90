"""State that simulated ranks share, because they share modules and arguments, and that one of them writes to.

Real ranks have a copy each. A table of a module through which ranks exchange gradients works on simulated ranks alone;
a cache works on both. Which of the two it is only real ranks can say, so what is written to is told by name. Looked at
is all that can be reached from given modules and objects by names, containers, attributes, closures and defaults,
through objects of the modules' own classes, modules and optimizers of torch, queues, events, locks, buffers and small
arrays. Not seen: what libraries keep for it, state inside C extensions, open files, and what is written and taken back
between two looks.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import math
import operator
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdpcheck.loading import references
from fsdpcheck.simulation.program_locks import ProgramLock
from fsdpcheck.simulation.scheduler import where

_MOST: Final = 4096
"""Places that are looked at, unless said otherwise: where a cache holds more, one that holds it was written to."""
_A_PLACE: Final = 20
"""What it costs to look at a place, beside the comparison of each thing that it holds, in such comparisons."""
_HOLDING: Final = (dict, list, tuple, set, frozenset, collections.deque, SimpleNamespace, bytearray)
_BOOKKEEPING: Final = frozenset({
    "__builtins__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__warningregistry__", "__spec__",
    "__loader__", "__abstractmethods__", "_abc_impl", "__module__", "__qualname__", "__slotnames__",
})  # fmt: skip
_PLAIN: Final = (int, float, bool, str, bytes, type(None))
_LARGEST: Final = 65536
"""Bytes of an array up to which it is looked at."""
_EMPTY: Final = CellType()
_GONE: Final = object()


@dataclass(slots=True)
class _Place:
    """One thing that can be written to, the dotted name it is found under, and what it held when last looked at."""

    name: str
    thing: Any
    read: Callable[[], list[Any]]
    held: list[Any]

    def written(self) -> Iterable[str]:
        """Its name if it holds something else now, or cannot be read because another thread is writing to it."""
        try:
            now, before = self.read(), self.held
        except Exception:
            return (self.name,)
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return ()
        self.held = now
        return () if len(now) == len(before) and all(map(_same, now, before)) else (self.name,)


@dataclass(slots=True)
class _Names:
    """The names of a module, or the variables around a function, each of which may stand for something else."""

    called: str
    read: Callable[[], dict[str, Any]]
    held: dict[str, Any]
    apart: frozenset[str] = _BOOKKEEPING
    thing: None = None

    def listed(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """What they are told as, and stand for."""
        return ((self.called.format(name), self.held[name]) for name in names if name not in self.apart)

    def written(self) -> Iterable[str]:
        """Those of the names that stand for something else now; a package's for a part that was imported is no such."""
        now, before = self.read(), self.held
        if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
            return ()
        self.held = now
        names = [name for name in {**before, **now} if name not in self.apart]
        other = [name for name in names if not _same(now.get(name, _GONE), before.get(name, _GONE))]
        told = ((self.called.format(name), now.get(name, _GONE), before.get(name, _GONE)) for name in other)
        return [name for name, *values in told if not all(_is_part(name, value) for value in values)]


@dataclass(slots=True)
class _Watched:
    """Places that are looked at together. ``since``: the ranks that have run since they were last looked at."""

    places: list[_Place | _Names]
    costs: float
    may_cost: float
    since: set[int] = field(default_factory=set)


@dataclass
class SharedState:
    """What ranks share. ``written``: names of what was written to, and in words by whom, as far as that was seen.

    ``each``: how much each rank that leaves adds to what looks may cost, in comparisons; a look is left out where it
    would cost more. Infinite: there is one whenever a rank leaves. Where several ranks have run since the look before,
    what is seen is of "a rank". ``most``: places that are looked at beside names of modules.
    """

    each: float = math.inf
    most: int = _MOST
    written: dict[str, str] = field(default_factory=dict)
    _watched: list[_Watched] = field(default_factory=list)
    _known: dict[int, Any] = field(default_factory=dict)
    """What was written to, by identity: it need not be looked at again, nor into."""

    def begin(
        self,
        modules: Sequence[ModuleType],
        apart: frozenset[tuple[str, str]] = frozenset(),
        roots: Mapping[str, Any] | None = None,
        may_cost: float = math.inf,
        near: int = 0,
    ) -> None:
        """Look before a run. ``apart``: (module, name) of what each rank has. ``roots``: what is shared besides.

        ``near``: how many of the modules, the first ones, are looked at with ``roots``, and not with the others.
        ``may_cost``: what looks at either may cost at first.
        """
        own, found = {module.__name__ for module in modules}, set(self._known)
        for homes, objects in ((modules[:near], roots or {}), (modules[near:], {})):
            names = [_of_module(module, apart) for module in homes]
            places = [*names, *self._reached(names, objects, own, found)]
            self._watched.append(_Watched(places, sum(len(place.held) + _A_PLACE for place in places), may_cost))

    def look(self, rank: int) -> None:
        """Look at what a rank has written, which is about to leave; called on its thread."""
        for watched in self._watched:
            watched.since.add(rank)
            watched.may_cost += self.each
            if watched.may_cost >= watched.costs:
                watched.may_cost -= watched.costs
                self._look(watched)

    def end(self) -> None:
        """Look after a run, and let go of all that was held."""
        for watched in self._watched:
            if watched.since:
                self._look(watched)
        self._watched = []

    def _look(self, watched: _Watched) -> None:
        for place in watched.places:
            for name in place.written():
                if name not in self.written:
                    self.written[name] = _writer(watched.since)
                self._known[id(place.thing)] = place.thing
        watched.since.clear()

    def _reached(
        self, names: list[_Names], objects: Mapping[str, Any], own: set[str], found: set[int]
    ) -> Iterator[_Place | _Names]:
        """Every place that is reached from names and objects and is not ``found`` yet."""
        pending, most = collections.deque(objects.items()), len(found) + self.most
        for value in objects.values():
            if type(value) is FunctionType and value.__closure__:
                found.add(id(value))
                names = [*names, around := _around(value)]
                yield around
        for those in names:
            pending += itertools.islice(those.listed(those.held), max(self.most - len(pending), 0))
        while pending and len(found) < most:
            told, value = pending.popleft()
            if id(value) in found or isinstance(value, _PLAIN) or (read := _reader(value, own)) is None:
                continue
            found.add(id(value))
            with suppress(Exception):  # whatever an object of the user's does when it is read
                held = read()
                yield _Place(told, value, read, held)
                pending += [(told, inner) for inner in held]


def _writer(since: set[int]) -> str:
    if len(since) > 1:
        return "a rank wrote to it"
    there = where(sys._getframe())
    return f"rank {min(since)} wrote to it" + (f", seen at {there}" if there else "")


def _of_module(module: ModuleType, apart: frozenset[tuple[str, str]]) -> _Names:
    theirs = _BOOKKEEPING | {name for home, name in apart if home == module.__name__}
    names = vars(module)
    return _Names(f"{_called(module)}.{{}}", lambda: dict(names), dict(names), theirs)


def _around(function: FunctionType) -> _Names:
    """The variables of enclosing functions that a function uses."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        return {name: cell.cell_contents for name, cell in cells.items() if cell != _EMPTY}

    return _Names(f"{{}} (around {function.__qualname__})", read, read())


def _called(module: ModuleType) -> str:
    """A module's name, or that of its file where it was imported under a name of ours."""
    is_file = module.__name__.startswith(references.FILE)
    return Path(str(module.__file__)).stem if is_file else module.__name__


def _reader(value: Any, own: set[str]) -> Callable[[], list[Any]] | None:
    """What reads all that ``value`` holds; None where nothing of it can be written to, or where it is not looked at."""
    kind = type(value)
    if issubclass(kind, _HOLDING):
        return functools.partial(_of_container, value)
    if kind in (Tensor, nn.Parameter):
        return lambda: _of_tensor(value)
    if kind is FunctionType:
        return (lambda: _of_function(value)) if value.__module__ in own else None
    if kind is MethodType:
        return lambda: [value.__self__, value.__func__]
    if kind is functools.partial:
        return lambda: [value.func, *value.args, *value.keywords.values()]
    if hasattr(kind, "cache_info"):
        return lambda: [value.cache_info().currsize, value.__wrapped__]
    if kind is itertools.count:
        return lambda: [repr(value)]
    if kind in _STATES:
        return functools.partial(_STATES[kind], value)
    if issubclass(kind, type):
        return (lambda: _of_names(vars(value))) if value.__module__ in own else None
    if issubclass(kind, property | staticmethod | classmethod):
        return lambda: [getattr(value, name, None) for name in ("fget", "fset", "__func__")]
    return (lambda: _of_object(value)) if kind.__module__ in own or issubclass(kind, nn.Module | Optimizer) else None


def _of_array(value: Any) -> list[Any]:
    return [value.tobytes() if value.nbytes <= _LARGEST and not value.dtype.hasobject else len(value)]


_STATES: Final[dict[type, Callable[[Any], list[Any]]]] = {
    queue.Queue: lambda value: [*value.queue],
    queue.LifoQueue: lambda value: [*value.queue],
    queue.PriorityQueue: lambda value: [*value.queue],
    queue.SimpleQueue: lambda value: [value.qsize()],
    threading.Event: lambda value: [value.is_set()],
    type(threading.Lock()): lambda value: [value.locked()],
    ProgramLock: lambda value: [repr(value)],
    io.BytesIO: lambda value: [value.getbuffer().nbytes, value.tell()],
    io.StringIO: lambda value: [value.tell()],
    np.ndarray: _of_array,
}
"""What objects of Python's and of numpy hold, that a program keeps as its own."""


def _of_tensor(value: Tensor) -> list[Any]:
    if value.is_inference():
        return [value.data_ptr()]
    return [value.data_ptr(), value._version, value.grad if value.is_leaf else None]


def _of_container(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, SimpleNamespace):
        return _of_names(vars(value))
    return [bytes(value)] if isinstance(value, bytearray) else [*value]


def _of_function(value: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
    return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]


def _of_object(value: Any) -> list[Any]:
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()) if isinstance(name, str)]
    held = [getattr(value, name) for name in slots if name not in _BOOKKEEPING and hasattr(value, name)]
    return [*_of_names(getattr(value, "__dict__", {})), *held, type(value)]


def _of_names(names: Any) -> list[Any]:
    return [part for name, value in list(names.items()) if name not in _BOOKKEEPING for part in (name, value)]


def _is_part(name: str, value: Any) -> bool:
    """Whether it is the module of this name, or none yet."""
    return value is _GONE or (isinstance(value, ModuleType) and value.__name__ == name)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
