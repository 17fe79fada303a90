"""Code of functions with counted lines: also of methods that call ``super()``.

``probed`` puts a call before every line that faults alter, of all of them at once, and alters none.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from tests.mechanisms import planting
from tests.mechanisms.planting import Change, Mechanism

Mark = tuple[int, str]
"""A line, counted from the first of the function's source, and the global that is called before it."""


class MethodChange(Change):
    """A change of a method whose code closes over ``__class__``, as every method does that calls ``super()``."""

    def altered(self, hit: str) -> CodeType:
        """The code with the change, compiled inside a function that has the cell."""
        source, _ = self._source()
        return compiled(self, source.replace(self.old, self.new), [(line_of(self), hit)])


def line_of(change: Change) -> int:
    """The line of the function's source, from 1, in which ``old`` and ``new`` first differ."""
    source, _ = change._source()
    same = next((i for i, (a, b) in enumerate(zip(change.old, change.new, strict=False)) if a != b), 0)
    return source[: source.index(change.old) + same].count("\n") + 1


def compiled(change: Change, source: str, marks: Iterable[Mark]) -> CodeType:
    """The code of the change's function with this source, under its file and lines, and with these marks."""
    _, first = change._source()
    tree = ast.parse(source)
    for line, hit in marks:
        planting._count(tree, line, hit)
    ast.increment_lineno(tree, first - 1)
    around = ast.parse("def around():\n    __class__ = None")
    assert isinstance(around.body[0], ast.FunctionDef)
    around.body[0].body += tree.body
    target = change.target
    whole = compile(ast.fix_missing_locations(around), target.__code__.co_filename, "exec", dont_inherit=True)
    code = _inside(_inside(whole, "around"), target.__name__)
    assert code.co_freevars == target.__code__.co_freevars
    return code.replace(co_qualname=target.__qualname__)


def _inside(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


@contextmanager
def probed(faults: Iterable[Mechanism], ran: Callable[[str], object]) -> Iterator[None]:
    """For the length of a block ``ran`` is called with a fault's name each time before a line runs that it alters."""
    probes = defaultdict[FunctionType, list[tuple[Change, Mark]]](list)
    for fault in faults:
        for change in fault.changes:
            hit = f"_probe_of_{fault.name}"
            change.target.__globals__[hit] = lambda name=fault.name: ran(name)
            probes[change.target].append((change, (line_of(change), hit)))
    before = {function: function.__code__ for function in probes}
    for function, marked in probes.items():
        change = marked[0][0]
        code = compiled(change, change._source()[0], [mark for _, mark in marked])
        target: Any = function
        target.__code__ = code
    try:
        yield
    finally:
        for target, code in before.items():
            target.__code__ = code
