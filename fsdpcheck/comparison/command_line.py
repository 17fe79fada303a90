"""The command line of a script as a function of the number of ranks: ``train.py --batch-size {16//W}``.

What stands in braces is arithmetic over W, the number of ranks, or a number that the user has given a name, so that a
failing run may be tried with a smaller one.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.programs.script import Script

_BRACES: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_MARKED: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*(\d+)\s*")
_TWO: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_WANTED: Final = (
    "numbers, W, + - * / // % **, min, max and parentheses, {16//W} say, or a number with a name, {layers:4} say"
)


@dataclass(frozen=True)
class CommandLine:
    """A script's command line with W in it. ``marked``: the numbers that have names, as given."""

    text: str
    words: tuple[str, ...]
    marked: Mapping[str, int] = field(default_factory=dict)

    def at(self, world_size: int, marked: Mapping[str, int] | None = None) -> Script:
        """The script on so many ranks. Raises UsageError where it cannot be read or W does not divide."""
        words = self.words_at(world_size, marked)
        if words[0] == "-m":
            return script.of_module(words[1], words[2:])
        return script.of_file(Path(words[0]), words[1:])

    def words_at(self, world_size: int, marked: Mapping[str, int] | None = None) -> tuple[str, ...]:
        """Its words on so many ranks. Raises UsageError where a number of a ``//`` is not divided by W."""
        values = {**self.marked, **(marked or {})}
        return tuple(_BRACES.sub(lambda match: _put(match, world_size, values, self.text), word) for word in self.words)

    def with_numbers(self, marked: Mapping[str, int]) -> str:
        """The command line as text, with other numbers where the user has marked some."""
        return _BRACES.sub(lambda match: _renumbered(match, marked), self.text)


def _renumbered(match: re.Match[str], marked: Mapping[str, int]) -> str:
    name = _MARKED.fullmatch(match[1]) if match[1] is not None else None
    return f"{{{name[1]}:{marked[name[1]]}}}" if name else match[0]


def read(text: str) -> CommandLine:
    """Raises UsageError for a line that cannot be split, names no script, or has braces that are no arithmetic."""
    held = [match[0] for match in _BRACES.finditer(text)]
    numbers = itertools.count()
    try:  # spaces inside braces part no words
        words = shlex.split(_BRACES.sub(lambda match: f"\0{next(numbers)}\0", text))
    except ValueError as error:
        raise UsageError(explain("the command line cannot be read", got=f"{text!r}: {error}")) from None
    words = [re.sub("\0(\\d+)\0", lambda match: held[int(match[1])], word) for word in words]
    if words[:1] in (["python"], ["python3"]):
        del words[0]
    if not words or words == ["-m"]:
        raise UsageError(explain("a script is missing", got=repr(text), then="'train.py --batch-size {16//W}'"))
    marked: dict[str, int] = {}
    for inside in (match[1] for word in words for match in _BRACES.finditer(word) if match[1] is not None):
        if name := _MARKED.fullmatch(inside):
            marked[name[1]] = int(name[2])
        else:
            _value(inside, 1, text, divided=False)
    return CommandLine(text, tuple(words), marked)


def _put(match: re.Match[str], world_size: int, marked: Mapping[str, int], text: str) -> str:
    if match[0] in ("{{", "}}"):
        return match[0][0]
    name = _MARKED.fullmatch(match[1])
    return str(marked[name[1]] if name else _value(match[1], world_size, text))


def _value(inside: str, world_size: int, text: str, divided: bool = True) -> int | float:
    try:
        tree = ast.parse(inside.strip(), mode="eval")
        value = _computed(tree.body, world_size, divided)
    except UsageError as error:
        raise UsageError(f"{error}\n  where   {{{inside}}} of {text}") from None
    except (SyntaxError, ValueError, TypeError, ArithmeticError) as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            explain("braces hold arithmetic over W", got=f"{{{inside}}}: {said}", wanted=_WANTED, where=text)
        ) from None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _computed(node: ast.AST, world_size: int, divided: bool) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id="W"):
            return world_size
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_computed(inner, world_size, divided)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=several, keywords=[]) if len(several) > 1:
            those = [_computed(one, world_size, divided=False) for one in several]  # {max(1, W//2)} is meant to round
            return min(those) if name == "min" else max(those)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            one, two = _computed(left, world_size, divided), _computed(right, world_size, divided)
            if divided and isinstance(op, ast.FloorDiv) and one % two:
                raise UsageError(
                    explain(
                        f"{one} is not divided by {two}, so {world_size} ranks would do other work than one",
                        got=f"{one} // {two} at W = {world_size}",
                        wanted=f"a multiple of {two}, {(one // two + 1) * two} say",
                        then="change the number, or leave this number of ranks out of --ranks",
                    )
                )
            computed: int | float = _TWO[type(op)](one, two)
            return computed
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is none of them")
