"""State of an implementation that simulated ranks share, because they share modules, and that a run writes to.

Real ranks have a copy each. A table of a module through which ranks exchange gradients works on simulated ranks alone;
a cache works on both. Which of the two it is only real ranks can say, so what is written to is reported, and whoever
has a law that holds tries it there (session). Looked at is all that can be reached from the modules of the
implementation by names, containers, attributes, closures and defaults, through objects of its own classes. Not seen:
what libraries keep for it, state inside C extensions, what is written and taken back between two collectives, and runs
not followed.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

from torch import Tensor, nn

from fsdpcheck import adapters
from fsdpcheck.case import StepSpec, TrainingCase
from fsdpcheck.engines._simulated.shared_locks import modules_of
from fsdpcheck.execution import RunRequest
from fsdpcheck.loading import references

_MOST: Final = 4096
"""Places that are looked at: where a cache holds more, one of those that hold it was written to."""
_HOLDING: Final = (dict, list, tuple, set, frozenset, collections.deque, SimpleNamespace, bytearray)
_BOOKKEEPING: Final = frozenset({
    "__builtins__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__warningregistry__", "__spec__",
    "__loader__", "__abstractmethods__", "_abc_impl", "__module__", "__qualname__", "__slotnames__",
})  # fmt: skip
_PLAIN: Final = (int, float, bool, str, bytes, type(None))


@dataclass(slots=True)
class _Place:
    """One thing that can be written to, the dotted name it is found under, and what it held when last looked at.

    ``thing``: None where it is the name itself, which may stand for something else.
    """

    name: str
    thing: Any
    read: Callable[[], list[Any]]
    held: list[Any]

    def is_other(self) -> bool:
        """Whether it holds something else now, or cannot be read because another thread is writing to it."""
        try:
            now, before = self.read(), self.held
        except Exception:
            return True
        self.held = now
        return len(now) != len(before) or not all(map(_same, now, before))


@dataclass
class SharedState:
    """What the ranks of one implementation share. ``written``: names of what was written to in a run of several."""

    reference: str
    written: dict[str, None] = field(default_factory=dict)
    _runs: collections.Counter[Hashable] = field(default_factory=collections.Counter)
    _places: list[_Place] = field(default_factory=list)
    _modules: list[ModuleType] = field(default_factory=list)
    _loaded: int = 0
    _known: dict[int, Any] = field(default_factory=dict)
    """What was written to, by identity: it need not be looked at again, nor into."""

    def begin(self, request: RunRequest) -> Callable[[int], None] | None:
        """Look before a run. Gives what is to be called whenever a rank leaves; None for a run that is not followed.

        Followed are, of each kind of run, the first and those of the numbers 2, 4, 8, ...: to look takes a tenth of a
        millisecond.
        """
        step = request.case.step if isinstance(request.case, TrainingCase) else StepSpec()
        kind = (step.private, step.norms, request.using, request.probes, bool(request.save_to))
        self._runs[kind] += 1
        if self._runs[kind] & (self._runs[kind] - 1):
            return None
        self._places = list(self._reached())
        return self._look

    def end(self) -> tuple[str, ...]:
        """Look after a run that is followed, and let go of all that was held; what was ever written to."""
        self._look(-1)
        self._places = []
        return tuple(self.written)

    def _look(self, _: int) -> None:
        for place in self._places:
            if place.is_other():
                self.written[place.name] = None
                self._known[id(place.thing)] = place.thing

    def _reached(self) -> Iterator[_Place]:
        """Every place that is not known to be written to."""
        if len(sys.modules) != self._loaded:
            self._modules, self._loaded = modules_of(self.reference), len(sys.modules)
        own = {module.__name__ for module in self._modules}
        apart = {tuple(dotted.split(":")) for dotted in adapters.features(self.reference).rank_local}
        found = set(self._known)
        pending: collections.deque[tuple[str, Any]] = collections.deque()
        for module in self._modules:
            for name, value in list(vars(module).items())[: max(_MOST - len(pending), 0)]:
                told = f"{_called(module)}.{name}"
                if name in _BOOKKEEPING or (module.__name__, name) in apart:
                    continue
                pending.append((told, value))
                if told not in self.written:
                    yield _Place(told, None, functools.partial(_of_name, vars(module), name), [value])
        while pending and len(found) < _MOST:
            told, value = pending.popleft()
            if id(value) in found or isinstance(value, _PLAIN) or (read := _reader(value, own)) is None:
                continue
            found.add(id(value))
            with suppress(Exception):  # whatever an object of the user's does when it is read
                held = read()
                yield _Place(told, value, read, held)
                pending += [(told, inner) for inner in held]


def _called(module: ModuleType) -> str:
    """A module's name, or that of its file where it was imported under a name of ours."""
    is_file = module.__name__.startswith(references.FILE)
    return Path(str(module.__file__)).stem if is_file else module.__name__


def _of_name(names: dict[str, Any], name: str) -> list[Any]:
    return [names[name]] if name in names else []


def _reader(value: Any, own: set[str]) -> Callable[[], list[Any]] | None:
    """What reads all that ``value`` holds; None where nothing of it can be written to, or where it is not looked at."""
    kind = type(value)
    if issubclass(kind, _HOLDING):
        return functools.partial(_of_container, value)
    if kind in (Tensor, nn.Parameter):
        return lambda: [value.data_ptr(), *([] if value.is_inference() else [value._version])]
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
    if issubclass(kind, type):
        return (lambda: _of_names(vars(value))) if value.__module__ in own else None
    if issubclass(kind, property | staticmethod | classmethod):
        return lambda: [getattr(value, name, None) for name in ("fget", "fset", "__func__")]
    return (lambda: _of_object(value)) if kind.__module__ in own else None


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


_EMPTY: Final = CellType()


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
