"""Planting: a function of the reference implementation with a line altered, in place for the length of a block.

The altered source is compiled under the file and the line numbers of the original, so that a traceback through it, and
whatever else looks at frames, names the very lines that are wrong. Only the code of the function is exchanged: the
function stays the same object, whoever has imported it by name or registered it as a hook.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

PACKAGE = "fsdpcheck.impl"

Quantity = Literal[
    "input", "output", "loss", "gradient (local)", "gradient (reduced)", "per-sample norm", "clip factor",
    "global norm", "noise", "parameter after step", "optimizer state", "checkpoint", "sample draw", "collective",
    "hang", "exception", "memory",
]  # fmt: skip
"""What can be the first that is wrong, in the order in which a step computes."""


Mark = tuple[int, str]
"""A line, counted from the first of the function's source, and the global that is called before it."""


@dataclass(frozen=True)
class Change:
    """``old`` occurs once in the source of ``function``, a qualified name in ``<package>.<module>``; ``new`` is there
    instead."""

    module: str
    function: str
    old: str
    new: str
    package: str = PACKAGE

    @property
    def file(self) -> str:
        """The file of the window, from the root of the repository."""
        parts = ["impl", *self.module.split(".")]
        return "/".join(parts) + ("/__init__.py" if hasattr(self._home(), "__path__") else ".py")

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of the file that ``old`` is part of."""
        source, first = self.source()
        begin = first + source[: source.index(self.old)].count("\n")
        return begin, begin + self.old.count("\n")

    @property
    def target(self) -> FunctionType:
        """The function, also where a property or a decorator stands around it."""
        holder: object = self._home()
        *path, last = self.function.split(".")
        for part in path:
            holder = getattr(holder, part)
        found = inspect.getattr_static(holder, last)
        found = inspect.unwrap(getattr(found, "fget", found))
        assert isinstance(found, FunctionType), f"{self.module}:{self.function} is {found!r}, wanted a function"
        return found

    @property
    def line(self) -> int:
        """The line of the function's source, from 1, in which ``old`` and ``new`` first differ."""
        source, _ = self.source()
        same = next((i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b), 0)
        return source[: source.index(self.old) + same].count("\n") + 1

    def altered(self, hit: str) -> CodeType:
        """The code with the change, which calls the global ``hit`` each time before the altered line runs."""
        source, _ = self.source()
        return self.compiled(source.replace(self.old, self.new), [(self.line, hit)])

    def compiled(self, source: str, marks: Iterable[Mark]) -> CodeType:
        """The function's code with this source, under its file and lines, and with these marks.

        It is compiled inside a function with the cell ``__class__``, over which a method closes that calls ``super()``.
        """
        _, first = self.source()
        tree = ast.parse(source)
        for line, hit in marks:
            _count(tree, line, hit)
        ast.increment_lineno(tree, first - 1)
        around = ast.parse("def around():\n    __class__ = None")
        assert isinstance(around.body[0], ast.FunctionDef)
        around.body[0].body += tree.body
        target = self.target
        whole = compile(ast.fix_missing_locations(around), target.__code__.co_filename, "exec", dont_inherit=True)
        code = _inside(_inside(whole, "around"), target.__name__)
        assert code.co_freevars == target.__code__.co_freevars
        return code.replace(co_qualname=target.__qualname__)

    def source(self) -> tuple[str, int]:
        """The function's source, and the line of its file that it begins in."""
        lines, first = inspect.getsourcelines(self.target)
        source = textwrap.dedent("".join(lines))
        found = source.count(self.old)
        assert found == 1, f"{self.old!r} occurs {found} times in {self.module}:{self.function}, wanted once"
        return source, first

    def _home(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.{self.module}")


class Hits:
    """How often altered lines ran. ``add`` counts one: no function of Python, so that whoever traces sees none."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self.add = self._count.__next__

    @property
    def hits(self) -> int:
        return int(repr(self._count).removeprefix("count(").removesuffix(")"))


@dataclass(frozen=True)
class Mechanism:
    """A bug that somebody reported, as an install: calling it gives a context manager with the attribute ``hits``.

    ``source``: where it was reported. ``what``: what goes wrong, in a sentence. ``quantity``: the first that should be
    wrong. ``stated``: whether the report states the mechanism; else it was deduced from symptoms that it states.
    ``adapter``: the one by which altered lines are reached, "" if there is none.
    ``shown``: whether test_planted.py shows that something changes; else ``why`` not.
    """

    name: str
    subject: str
    source: str
    what: str
    quantity: Quantity
    changes: tuple[Change, ...]
    stated: bool = True
    shown: bool = True
    why: str = ""
    adapter: str = "reference"

    @contextmanager
    def __call__(self) -> Iterator[Hits]:
        counter = Hits()
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(_in_place(change, f"_hit_of_{self.name}", counter))
            yield counter

    @property
    def window(self) -> list[str]:
        """ "file:first-last function" of each change."""
        return [f"{c.file}:{'-'.join(map(str, sorted({*c.lines})))} {c.function}" for c in self.changes]


@dataclass
class Collection:
    """The mechanisms of one module, by name."""

    subject: str
    mechanisms: dict[str, Mechanism] = field(default_factory=dict)

    def mechanism(
        self,
        source: str,
        quantity: Quantity,
        *,
        stated: bool = True,
        shown: bool = True,
        why: str = "",
        adapter: str = "reference",
    ) -> Callable[[Callable[[], Change | tuple[Change, ...]]], Mechanism]:
        """Decorates a function that gives the change; its docstring says what goes wrong."""

        def recorded(changing: Callable[[], Change | tuple[Change, ...]]) -> Mechanism:
            changes = changing()
            together = changes if isinstance(changes, tuple) else (changes,)
            what = " ".join(inspect.cleandoc(changing.__doc__ or "").split())
            assert what, f"{changing.__name__} does not say what goes wrong"
            name = changing.__name__
            made = Mechanism(name, self.subject, source, what, quantity, together, stated, shown, why, adapter)
            self.mechanisms[name] = made
            return made

        return recorded


@contextmanager
def _in_place(change: Change, hit: str, counter: Hits) -> Iterator[None]:
    target: Any = change.target
    before, altered = target.__code__, change.altered(hit)
    target.__globals__[hit] = counter.add
    target.__code__ = altered
    try:
        yield
    finally:
        target.__code__ = before
        target.__globals__.pop(hit, None)


def _inside(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _count(tree: ast.Module, line: int, hit: str) -> None:
    """Put a call of ``hit`` before the innermost statement that ``line`` is part of."""
    inside: list[tuple[int, list[ast.stmt], int]] = []
    for node in ast.walk(tree.body[0]):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for place, statement in enumerate(block):
                end = statement.end_lineno or statement.lineno
                if statement.lineno <= line <= end:
                    inside.append((end - statement.lineno, block, place))
    assert inside, f"line {line} is part of no statement"
    _, block, place = min(inside, key=lambda found: found[0])
    call = ast.Expr(ast.Call(ast.Name(hit, ast.Load()), [], []))
    block.insert(place, ast.copy_location(call, block[place]))
