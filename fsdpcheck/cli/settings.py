"""Settings of a command in pyproject.toml and in the environment, as words of its command line."""

from __future__ import annotations

import argparse
import io
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Final

from fsdpcheck.errors import UsageError, explain, reading, spelling

TABLE: Final = "tool.fsdpcheck"
OTHERS: Final = ("waiver",)
"""Keys of the table that are no options."""


def words(parser: argparse.ArgumentParser, given: Sequence[str], file: Path) -> list[str]:
    """Words for all that ``file`` and the environment set and ``given`` does not. The environment replaces the file.

    Each option of ``parser`` is a key of the table [tool.fsdpcheck], without its dashes, and a variable: FSDPCHECK_SEED
    for --seed. Raises UsageError with the line of a key that is no option, and of a value that it does not take.
    """
    known = {option[2:]: action for action in parser._actions for option in action.option_strings if option[:2] == "--"}
    found: dict[str, list[str]] = {}
    for key, value, where in _of_file(file):
        name = key.replace("_", "-")
        if name not in known:
            hint = spelling.hint(name, known)
            then = "" if hint else f"`{parser.prog} --help` names all: a setting is an option without its dashes"
            raise UsageError(explain(f"unknown setting {key!r}.{hint}", where=where, then=then))
        found[name] = _taken(parser, _words(known[name], name, value, where), f"{name} = {value!r}", where)
    for name, action in known.items():
        variable = _variable(name)
        if (text := os.environ.get(variable)) is not None:
            value = text.lower() in ("1", "true", "yes") if action.nargs == 0 else text
            found[name] = _taken(parser, _words(action, name, value, variable), f"{variable}={text}", variable)
    replaced = _given(known, given)
    return [word for name, said in found.items() if name not in replaced for word in said]


def adapters(file: Path) -> list[str]:
    """The adapters that a gate judges by ``file``. Raises UsageError for a file or setting that is none."""
    named = [(value, where) for key, value, where in _of_file(file) if key == "adapter"]
    found = [ref for value, _ in named for ref in (value if isinstance(value, list) else [value])]
    if not all(isinstance(ref, str) for ref in found):
        raise UsageError(explain("adapter names no adapters", got=repr(found), wanted="strings", where=named[0][1]))
    return found


def are_in(file: Path) -> bool:
    """Whether ``file`` has such a table; one that cannot be read has none."""
    try:
        return any(True for _ in _of_file(file))
    except UsageError:
        return False


def place(file: Path, option: str, said: Sequence[str], glob: str) -> str:
    """Where ``glob`` is written of what a repeatable ``option`` says: "file:line" or a variable; else "".

    ``said``: all values of the option. They come from one place alone: the command line replaces the others.
    """
    if os.environ.get(_variable(option)) in said:
        return _variable(option)
    for key, value, where in _of_file(file):
        values = value if isinstance(value, list) else [value]
        if key.replace("_", "-") == option and values == [*said]:
            whole = next((one for one in values if glob in [part.strip() for part in one.split(",")]), "")
            line = _line_of_value(reading.text(file), int(where.rpartition(":")[2]), whole)
            return f"{file}:{line}"
    return ""


def _variable(option: str) -> str:
    """The variable of the environment that stands for an option."""
    return f"FSDPCHECK_{option.upper().replace('-', '_')}"


def _line_of_value(text: str, first: int, value: str) -> int:
    """The line on which ``value`` stands in quotes, from line ``first`` on; ``first`` where it is written otherwise."""
    quoted = (f'"{value}"', f"'{value}'")
    lines = text.splitlines()[first - 1 :]
    return first + next((n for n, line in enumerate(lines) if any(one in line for one in quoted)), 0)


def _of_file(file: Path) -> Iterator[tuple[str, Any, str]]:
    """(key, value, "file:line") of each setting; nothing where there is no such file or table."""
    if not file.exists():
        return
    text = reading.text(file)
    try:
        table: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(explain(f"{file} is no TOML", got=error, then="mend it, or leave it out")) from error
    for part in TABLE.split("."):
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(explain(f"{TABLE} in {file} is no table", got=repr(table), wanted=f"[{TABLE}]"))
    for key, value in table.items():
        if key in OTHERS:
            continue
        yield key, value, f"{file}:{_line(text, key)}"


def _line(text: str, key: str) -> int:
    """The line of ``key`` in the table; of the table where the key is written otherwise."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if re.match(rf"\s*\[\s*{re.escape(TABLE)}\s*\]", line)), 0)
    of_key = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
    return 1 + next((n for n in range(begin, len(lines)) if of_key.match(lines[n])), begin)


def _words(action: argparse.Action, name: str, value: Any, where: str) -> list[str]:
    """``value`` as the words of an option. Raises UsageError for a value of a wrong kind."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(explain(f"{name} is on or off", got=repr(value), wanted="true or false", where=where))
        return [f"--{name}"] * value
    parts = value if isinstance(value, list) else [value]
    if not parts or any(isinstance(part, bool | dict | list) for part in parts):
        wanted = "a string, a number, or a list of them"
        raise UsageError(explain(f"{name} has a wrong value", got=repr(value), wanted=wanted, where=where))
    if isinstance(action, argparse._AppendAction):
        return [f"--{name}={part}" for part in parts]
    return [f"--{name}={','.join(map(str, parts))}"]


def _taken(parser: argparse.ArgumentParser, said: list[str], what: str, where: str) -> list[str]:
    """``said``, which the parser takes. Raises UsageError with its words where it does not."""
    err = io.StringIO()
    try:
        with redirect_stderr(err):
            parser.parse_args(said)
    except SystemExit as error:
        told = err.getvalue().strip().rpartition("error: ")[2]
        raise UsageError(explain(f"a setting is wrong: {what}", got=told, where=where)) from error
    return said


def _given(known: Mapping[str, argparse.Action], words: Sequence[str]) -> set[str]:
    """Names of the options that a command line has, in full, cut short or by their letters."""
    found = set()
    for word in words:
        said = word.partition("=")[0]
        if said[2:] in known:
            found.add(said[2:])
        elif said.startswith("--"):
            found |= {name for name in known if name.startswith(said[2:])}
        elif said.startswith("-"):
            found |= {name for name, action in known.items() if said[:2] in action.option_strings}
    return found
