"""Mutants: an implementation with one place of its source altered, as an install.

It is called ``fsdpcheck.studies.faults.mutants:NAME``, and NAME "<module>/<function>/<operator>.<number>", the module
as a dotted name or as the path of its file; so a mutant keeps its name when lines around its function move. The altered
source is compiled under the file and lines of the original, and only the code of the function is exchanged: it stays
the same object, whoever has imported it or registered it as a hook.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from fsdpcheck.studies.faults import operators
from fsdpcheck.studies.faults.operators import Function, Site

INSTALL: Final = f"{__name__}:"
_HIT: Final = "_fsdpcheck_hit_of_a_mutant"


@dataclass(frozen=True)
class Mutant:
    """``site`` of ``function``, a qualified name in ``module``, which is the dotted name or path of ``file``."""

    module: str
    function: str
    file: str
    site: Site

    @property
    def name(self) -> str:
        """What it is called in reports: the path of a file is relative to the working folder, if it lies there."""
        path, here = Path(self.module), Path.cwd()
        module = path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else self.module
        return f"{module}/{self.function}/{self.site.name}"

    @property
    def install(self) -> str:
        return f"{INSTALL}{self.module}/{self.function}/{self.site.name}"

    @property
    def says(self) -> str:
        """What stands there instead of what."""
        return f"`{self.site.before}` becomes `{self.site.after or 'pass'}`"


@dataclass
class Hits:
    """How often an altered statement began."""

    hits: int = 0

    def __call__(self) -> None:
        self.hits += 1


def all_of(lines: Iterable[tuple[str, int]], modules: Callable[[str], str]) -> list[Mutant]:
    """Every mutant of statements that ran: ``lines`` are (file, number).

    ``modules``: file -> what its module is called, "" for a file that is not altered. In the order of their names.
    """
    ran: dict[str, set[int]] = {}
    for file, number in lines:
        ran.setdefault(file, set()).add(number)
    found = []
    for file, numbers in ran.items():
        module = modules(file)
        if module:
            for name, function in functions(Path(file)).items():
                here = (site for site in operators.sites(function) if site.line in numbers)
                found += [Mutant(module, name, file, site) for site in here]
    return sorted(found, key=lambda mutant: mutant.name)


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """``count`` of them, or all where there are fewer; the same for equal names and seeds."""
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def functions(file: Path) -> dict[str, Function]:
    """Functions of a file that are no part of another function, by qualified name."""
    return dict(_functions(_tree(str(file), file.stat().st_mtime_ns).body, ""))


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse], prefix)


@functools.lru_cache(maxsize=512)
def _tree(file: str, changed: int) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def __getattr__(name: str) -> Callable[[], AbstractContextManager[Hits]]:
    parts = name.rsplit("/", 2)
    if len(parts) != 3:
        raise AttributeError(f"{name!r} is no mutant: wanted MODULE/FUNCTION/OPERATOR.NUMBER")
    module, function, site = parts
    try:
        target = _target(_module(module), function)
    except (ImportError, AttributeError, TypeError) as error:
        raise AttributeError(f"the mutant {name!r}: {error}") from error
    return functools.partial(_in_place, target, function, site)


def _module(name: str) -> ModuleType:
    """The module of a dotted name or of a file, which an adapter has imported by then."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    for module in sys.modules.copy().values():
        if getattr(module, "__file__", None) == name:
            return module
    raise ImportError(f"no module of {name} has been imported")


def _target(module: ModuleType, qualified: str) -> FunctionType:
    """The function itself, also where a property or a decorator stands around it."""
    holder: Any = module
    *path, last = qualified.split(".")
    for part in path:
        holder = inspect.getattr_static(holder, part)
    found: Any = inspect.getattr_static(holder, last)
    for inside in ("fget", "func", "__func__"):
        found = getattr(found, inside, found)
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise TypeError(f"{qualified} is no function of Python's own, but {type(found).__name__}")
    return found


@contextmanager
def _in_place(target: FunctionType, function: str, site: str) -> Iterator[Hits]:
    counter, before = Hits(), target.__code__
    target.__code__ = _altered(target, function, site)
    target.__globals__[_HIT] = counter
    _forget(target)
    try:
        yield counter
    finally:
        target.__code__ = before
        target.__globals__.pop(_HIT, None)
        _forget(target)


def _forget(target: FunctionType) -> None:
    """Have functions of its module that keep their results (functools.cache) compute them anew."""
    for value in list(target.__globals__.values()):
        if callable(clear := getattr(value, "cache_clear", None)):
            clear()


def _altered(target: FunctionType, function: str, site: str) -> CodeType:
    file = target.__code__.co_filename
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    try:
        operators.changed(dict(_functions(tree.body, ""))[function], site, _HIT)
    except KeyError:
        raise AttributeError(f"{file} has no place {site} in {function}; it was altered since") from None
    whole = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
    for code in _codes(whole):
        if (code.co_qualname, code.co_firstlineno) == (target.__code__.co_qualname, target.__code__.co_firstlineno):
            return code
    raise AttributeError(f"{file} has no {function} at line {target.__code__.co_firstlineno}; it was altered since")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
