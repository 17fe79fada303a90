"""Names: which object each name of a module or class stands for, of all that a judge computes with.

Watched are modules by where they belong, found in sys.modules, and the classes made in them: torch's public parts,
all of fsdpcheck and Hypothesis, and what the modules of fsdpcheck import. A name is compared by identity; one list
comparison a module or class tells that nothing happened (10 ns a name, 70 ns where the cache has lost it).
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, MappingProxyType, ModuleType
from typing import Any, Final

from fsdpcheck.compat import frames_private

_OFTEN: Final = (
    "fsdpcheck.checks.", "fsdpcheck.exact.", "fsdpcheck.properties.", "fsdpcheck.case.", "torch.nn.functional.",
    "torch.nn.init.", "torch.nn.modules.", "torch.nn.parameter.", "torch.optim.", "torch.autograd.function.",
    "torch.autograd.graph.", "torch.autograd.functional.", "torch.autograd.grad_mode.", "torch.linalg.",
    "torch.functional.", "torch._tensor.", "torch.overrides.", "torch.random.", "torch.utils._python_dispatch.",
)  # fmt: skip
"""Watched with all that is below them: what a judge computes with, or ranks and judge alike."""
_OFTEN_ALONE: Final = (
    "torch", "torch.nn", "torch.autograd", "torch._C._nn", "torch._C._linalg", "torch._C._VariableFunctions",
    "torch.distributed", "builtins", "sys", "os", "math", "random", "time", "hypothesis", "hypothesis.core",
    "hypothesis._settings", "hypothesis.control", *(
        f"fsdpcheck.{name}"
        for name in (
            "errors", "execution.deadlock", "execution.matching", "findings.verdict", "judging.check",
            "judging.exploration", "judging.run", "oracle", "oracle.certificate", "oracle.low_precision",
            "oracle.standards", "workload.batches", "workload.clip_groups", "workload.layers", "workload.losses",
            "workload.models", "workload.numerics",
        )
    ),
)  # fmt: skip
"""Watched too, without what is below them."""
_SELDOM: Final = (
    "fsdpcheck.", "hypothesis.", "numpy.", *(
        f"torch.{name}."
        for name in (
            "nn", "autograd", "fft", "special", "amp", "func", "distributed", "utils", "library", "_ops",
        )
    ),
)  # fmt: skip
"""Watched with all that is below them, but in the middle of a law's cases: only ranks compute with most of it."""
_UNWATCHED: Final = (
    "torch.nn.quantized.",
    "torch.nn.quantizable.",
    "torch.nn.intrinsic.",
    "torch.nn.qat.",
    "torch.utils.data.",
)
_BOOKKEEPING: Final = frozenset({
    "__doc__", "__annotations__", "__annotate__", "__annotate_func__", "__slotnames__", "__warningregistry__",
    "__builtins__", "__abstractmethods__", "__parameters__", "__signature__", "__dict__", "__weakref__", "__file__",
    "__cached__", "__spec__", "__loader__", "__path__", "_abc_impl", "__firstlineno__", "__static_attributes__",
})  # fmt: skip
"""Names that Python and its modules write by themselves."""
_ELSEWHERE: Final = frozenset({
    ("sys", "stdout"), ("sys", "stderr"), ("sys", "stdin"), ("sys", "last_traceback"), ("sys", "last_type"),
    ("sys", "last_value"), ("sys", "last_exc"), ("builtins", "_"),
})  # fmt: skip
"""(module, name) of what is kept for each rank elsewhere, or is no function."""

GONE: Final = object()
"""Stands for a name that is not there."""


@dataclass(frozen=True, slots=True)
class Name:
    """One name of one module or class that stands for something else than before; GONE where there was or is none."""

    home: Any
    name: str
    was: Any
    now: Any

    @property
    def path(self) -> str:
        if isinstance(self.home, ModuleType):
            return f"{self.home.__name__}.{self.name}"
        return f"{self.home.__module__}.{self.home.__qualname__}.{self.name}"

    def told(self) -> str:
        """What is left, in words: "torch.nn.functional.linear replaced by train.linear"."""
        if self.now is GONE:
            return f"{self.path} deleted"
        return f"{self.path} {'added' if self.was is GONE else 'replaced'} {_described(self.now)}".rstrip()

    def put_back(self) -> None:
        self._put(self.was)

    def put_in_place(self) -> None:
        self._put(self.now)

    def _put(self, value: Any) -> None:
        if isinstance(self.home, ModuleType):
            if value is GONE:
                vars(self.home).pop(self.name, None)
            else:
                vars(self.home)[self.name] = value
        elif value is not GONE:
            setattr(self.home, self.name, value)
        elif self.name in vars(self.home):
            delattr(self.home, self.name)


def is_wrapped(was: Any, now: Any) -> bool:
    """Whether ``now`` is what torch makes of ``was``: it profiles the ``step`` of optimizers, and counts modules.

    Or of what it made ``was`` of: the same function of a base class, wrapped for each class in the order of their use.
    """
    if not _is_of_torch(now):
        return False
    inside = (cell.cell_contents for cell in now.__closure__ or () if cell != _EMPTY)
    if any(value is was for value in inside):
        return True
    before, (_, *wrapped) = list(_layers(was)), _layers(now)
    return not any(layer is now for layer in before) and any(one is other for one in wrapped for other in before)


def _layers(value: Any) -> Iterator[Any]:
    """``value`` and what torch has put it around, from the outermost to the innermost."""
    yield value
    while _is_of_torch(value) and (value := getattr(value, "__wrapped__", None)) is not None:
        yield value


def _is_of_torch(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and frames_private.is_torch(code.co_filename)


_EMPTY: Final = CellType()


def _described(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"by {module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""


class _Space:
    """The names of one module or class, and what they stood for when last saved."""

    __slots__ = ("home", "names", "read", "values", "view")

    def __init__(self, home: Any) -> None:
        self.home = home
        self.view: Mapping[str, Any] | MappingProxyType[str, Any] = vars(home)
        self.read = self.view.values
        self.save()

    def save(self) -> None:
        self.names, self.values = list(self.view), list(self.view.values())

    def changes(self) -> Iterator[Name]:
        now = dict(self.view)
        for name, was in zip(self.names, self.values, strict=True):
            found = now.pop(name, GONE)
            if found is not was and self._matters(name, was, found):
                yield Name(self.home, name, was, found)
        for name, found in now.items():
            if self._hides(name, found):
                yield Name(self.home, name, GONE, found)

    def _matters(self, name: str, was: Any, now: Any) -> bool:
        in_module = isinstance(self.home, ModuleType)
        if name in _BOOKKEEPING or (in_module and (name.startswith("__") or (self.home.__name__, name) in _ELSEWHERE)):
            return False  # in modules such names are Python's, and torch.compile's
        if was is None or is_wrapped(was, now):
            return False  # None stands for what is loaded later
        return name.isupper() or any(callable(v) or hasattr(v, "__get__") or type(v) is ModuleType for v in (was, now))

    def _hides(self, name: str, found: Any) -> bool:
        """Whether a new name stands before another thing that was found under it until now."""
        if isinstance(self.home, ModuleType):
            return hasattr(builtins, name) and not name.startswith("__")
        inherited = next((vars(base)[name] for base in self.home.__mro__[1:] if name in vars(base)), found)
        return name not in _BOOKKEEPING and inherited is not found and not is_wrapped(inherited, found)


class Names:
    """All watched names. ``save`` takes what they stand for now; ``changes`` says which stand for something else.

    ``often``: only those that are compared after every run. ``all_of_them``: whether others are watched at all.
    """

    def __init__(self, all_of_them: bool = True) -> None:
        self._all = all_of_them
        self._often: dict[int, _Space] = {}
        self._seldom: dict[int, _Space] = {}
        self._modules = 0
        self._named: set[str] = set()
        self._trifles: list[_Space] = []

    def save(self) -> None:
        """Take the names as they are."""
        for space in self._unlike(often=False):
            space.save()
        self.look_for_more()

    def changes(self, often: bool = False) -> list[Name]:
        """What stands for something else than when it was saved. A module that was loaded since is not known."""
        found = []
        for space in self._unlike(often):
            those = list(space.changes())
            found += those
            if not those:  # what is other does not matter, and need not be looked at again
                self._trifles.append(space)
        return found

    def look_for_more(self) -> None:
        """Add the modules that were loaded since, and take again what was other and did not matter."""
        while self._trifles:
            self._trifles.pop().save()
        if len(sys.modules) == self._modules:
            return
        loaded, self._modules = sys.modules.copy(), len(sys.modules)
        ours = (module for name, module in loaded.items() if name.startswith("fsdpcheck"))
        named = {value.__name__ for module in ours for value in vars(module).values() if _is_module(value)}
        self._named |= {name for name in named if name.partition(".")[0] in sys.stdlib_module_names}
        for name, module in loaded.items():
            if _is_module(module) and id(module) not in self._often and id(module) not in self._seldom:
                self._add(name, module)

    def spaces(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """(module or class, what its names stood for when saved)."""
        for space in (*self._often.values(), *self._seldom.values()):
            yield space.home, dict(zip(space.names, space.values, strict=True))

    def _unlike(self, often: bool) -> list[_Space]:
        """Spaces that are not as they were, most of them because of names that do not matter."""
        looked_at = [self._often] if often else [self._often, self._seldom]
        try:
            return [one for those in looked_at for one in those.values() if [*one.read()] != one.values]
        except Exception:  # whatever a new value's comparison does
            return [one for those in looked_at for one in those.values()]

    def _add(self, name: str, module: ModuleType) -> None:
        if name in _OFTEN_ALONE or f"{name}.".startswith(_OFTEN):
            spaces = self._often
        elif self._all and (
            name in self._named or (f"{name}.".startswith(_SELDOM) and not f"{name}.".startswith(_UNWATCHED))
        ):
            spaces = self._seldom
        else:
            return
        spaces[id(module)] = _Space(module)
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == name:  # asks nothing of the value
                for base in (value, *(b for b in value.__mro__[1:] if b.__module__.startswith("torch."))):
                    if base.__flags__ & _CHANGEABLE and id(base) not in self._often:
                        spaces.setdefault(id(base), _Space(base))


_CHANGEABLE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: names of other classes cannot be set."""


def _is_module(value: object) -> bool:
    return isinstance(value, ModuleType)
