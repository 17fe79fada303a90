"""A script as the program of a rank: compiled once, run on each rank as its ``__main__``."""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

from fsdpcheck.errors import UsageError, explain


class Runnable(Protocol):
    """What each rank runs as its ``__main__``."""

    def main(self, rank: int) -> ModuleType:
        """The module that a rank runs it in."""

    def run(self) -> None:
        """Run it on the rank that this is."""


@dataclass(frozen=True)
class Script:
    """A program as ``python FILE ...`` or ``python -m MODULE ...`` runs it.

    ``path``: its file. ``first``: what ``sys.path`` begins with. ``package``: ``__package__`` of a module, else None.
    """

    path: str
    code: CodeType
    argv: tuple[str, ...]
    first: str
    package: str | None = None
    spec: Any = None

    def main(self, rank: int) -> ModuleType:
        """The module that a rank runs it in."""
        made = ModuleType("__main__")
        made.__file__, made.__package__, made.__spec__ = self.path, self.package, self.spec
        made.__dict__["__builtins__"] = __builtins__
        return made

    def run(self) -> None:
        """Run it on the rank that this is; its functions have code of their own, by which torch.compile knows them."""
        sys.argv[:] = self.argv
        sys.path[:0] = [self.first]
        exec(marshal.loads(marshal.dumps(self.code)), sys.modules["__main__"].__dict__)


def of_file(path: Path, arguments: Sequence[str]) -> Script:
    """Raises UsageError for a file that cannot be read or is no Python."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(
            explain(
                f"there is no script {str(path)!r}", got=error.strerror, wanted="a Python file", then="give its path"
            )
        ) from error
    code = _compiled(source, str(path))
    return Script(str(path), code, (str(path), *arguments), os.path.dirname(os.path.abspath(path)))


def of_module(name: str, arguments: Sequence[str]) -> Script:
    """What ``python -m name`` runs. Raises UsageError for what it would not find."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError as error:
        raise UsageError(explain(f"there is no module {name!r}", got=str(error), then="look at its name")) from error
    finally:
        sys.path.pop(0)
    if spec is None or spec.origin is None or spec.loader is None:
        raise UsageError(explain(f"there is no module {name!r} that can be run", then="give the path of a file"))
    code = _compiled(Path(spec.origin).read_bytes(), spec.origin)
    return Script(spec.origin, code, (spec.origin, *arguments), os.getcwd(), spec.parent, spec)


def _compiled(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        if not isinstance(error, SyntaxError):
            raise UsageError(explain(f"{path} is no Python", got=str(error))) from error
        line = (error.text or "").rstrip("\n")
        caret = " " * max((error.offset or 1) - 1, 0) + "^"
        where = f"{path}:{error.lineno}"
        raise UsageError(
            explain("the script has a syntax error", got=error.msg, where=where) + f"\n    {line}\n    {caret}"
        ) from None
