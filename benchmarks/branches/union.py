"""Branches of the functions of ``impl/``, told by their source text, which outlives an edit above them."""

from __future__ import annotations

import ast
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coverage import Coverage

from fsdpcheck import impl

ROOT: Final = Path(impl.__file__).parent
_NO_LAW: Final = "faults"
"""The folder of planted faults, which only studies plant."""


@dataclass(frozen=True, order=True)
class Branch:
    """From a line of a function to another, or to its end: the text of both, and which of several of equal text."""

    file: str
    function: str
    origin: str
    end: str
    number: int = 1
    refuses: bool = False

    def __str__(self) -> str:
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.file}::{self.function}: {self.origin} -> {self.end}{again}"


def branches(files: Sequence[Path]) -> set[Branch]:
    """All branches there are in the files that any of the sessions imported."""
    with tempfile.TemporaryDirectory(prefix="fsdpcheck-branches-") as scratch:
        whole = Coverage(data_file=str(Path(scratch) / "whole"), branch=True, config_file=False, messages=False)
        whole.combine([str(file) for file in files], keep=True)
        return {one for ran in (True, False) for one in _of(whole, ran)}


def taken(file: Path) -> set[Branch]:
    """Those that one session took."""
    whole = Coverage(data_file=str(file), branch=True, config_file=False, messages=False)
    whole.load()
    return set(_of(whole, True))


def _of(whole: Coverage, ran: bool) -> Iterator[Branch]:
    for name, data in _reported(whole).items():
        path = Path(name).resolve()
        if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / _NO_LAW):
            continue
        known = _of_file(path)
        for function, one in data["functions"].items():
            if function:
                yield from (known(function, *arc) for arc in one["executed_branches" if ran else "missing_branches"])


def _reported(whole: Coverage) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fsdpcheck-branches-") as scratch:
        told = Path(scratch) / "coverage.json"
        whole.json_report(outfile=str(told), ignore_errors=True)
        found: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))["files"]
        return found


@functools.cache
def _of_file(path: Path) -> Any:
    """A branch of this file, by its function and lines."""
    source = path.read_text(encoding="utf-8")
    lines, refusing = source.splitlines(), _refusing(ast.parse(source))

    def branch(function: str, first: int, last: int) -> Branch:
        origin, end = lines[first - 1].strip(), "exit" if last < 0 else lines[last - 1].strip()
        number = sum(line.strip() == origin for line in lines[:first])
        return Branch(str(path.relative_to(ROOT)), function, origin, end, number, last in refusing)

    return branch


def _refusing(tree: ast.AST) -> set[int]:
    """Lines of blocks that end by raising an error."""
    found: set[int] = set()
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            if not (isinstance(block, list) and block and isinstance(block[-1], ast.Raise)):
                continue
            ends = block[-1:] if isinstance(node, ast.FunctionDef | ast.Module | ast.ClassDef) else block
            found |= {line for one in ends for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    return found
