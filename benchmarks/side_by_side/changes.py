"""Changes of methods that call ``super()``, which tests/mechanisms/planting.py cannot compile."""

from __future__ import annotations

import ast
from types import CodeType

from tests.mechanisms import planting


class MethodChange(planting.Change):
    """A change of a method whose code closes over ``__class__``, as every method does that calls ``super()``."""

    def altered(self, hit: str) -> CodeType:
        """The code with the change, compiled inside a function that has the cell."""
        source, first = self._source()
        tree = ast.parse(source.replace(self.old, self.new))
        same = next((i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b), 0)
        planting._count(tree, source[: source.index(self.old) + same].count("\n") + 1, hit)
        ast.increment_lineno(tree, first - 1)
        around = ast.parse("def around():\n    __class__ = None")
        assert isinstance(around.body[0], ast.FunctionDef)
        around.body[0].body += tree.body
        file = self.target.__code__.co_filename
        whole = compile(ast.fix_missing_locations(around), file, "exec", dont_inherit=True)
        code = _inside(_inside(whole, "around"), self.target.__name__)
        assert code.co_freevars == self.target.__code__.co_freevars
        return code.replace(co_qualname=self.target.__qualname__)


def _inside(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
