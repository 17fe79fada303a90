"""Reading: files that anybody may have written. Whatever is in them, what goes wrong is one line."""

from __future__ import annotations

import dataclasses
import json
import math
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

MAX_FILE: Final = 1 << 26  # bytes; the report of a nightly session has about a hundredth of them
_MAX_INTEGER: Final = 1 << 53  # what every reader of JSON keeps exactly


class Unreadable(ValueError):
    """What was read is not what was wanted; the message says why in one line."""


def content(path: Path) -> bytes:
    """What is in a regular file. Raises Unreadable: a folder, a pipe, a device, too large."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable("it is no regular file")
        if found.st_size > MAX_FILE:
            raise Unreadable(f"it is larger than {MAX_FILE} bytes, so it is none of ours")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(getattr(error, "strerror", None) or str(error)) from None


def text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file, as UTF-8. Raises Unreadable as ``content`` does, and where it is not UTF-8."""
    try:
        return content(path).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 (at byte {error.start})") from None


def json_data(written: str) -> Any:
    """JSON as data. Raises Unreadable for what is none, NaN, nesting that nobody writes, and numbers without end."""
    try:
        return json.loads(written, parse_constant=_constant)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"it holds no JSON: {_short(str(error))}") from None


def typed(kind: Any, data: Any, where: str) -> Any:
    """``data`` as a value of the annotated type ``kind``: a dataclass, mapping, tuple, literal, union or plain type.

    Fields of a dataclass that are missing have their default. Raises Unreadable naming the place that differs.
    """
    if dataclasses.is_dataclass(kind):
        return _object(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin is typing.Literal:
        return data if type(data) is str and data in arguments else _refuse(where, data, "a word that it may be")
    if origin is types.UnionType:
        return None if data is None else typed(arguments[0], data, where)
    if origin is tuple:
        items = data if isinstance(data, list | tuple) else _refuse(where, data, "a list")
        return tuple(typed(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(items))
    if origin is not None and issubclass(origin, Mapping):
        pairs = data.items() if isinstance(data, dict) else _refuse(where, data, "an object")
        return {name: typed(arguments[1], value, f"{where}.{_short(name)}") for name, value in pairs}
    return _plain(kind, data, where)


def _plain(kind: Any, data: Any, where: str) -> Any:
    whole = type(data) is int and abs(data) < _MAX_INTEGER
    if kind is float:
        return data if whole or (type(data) is float and math.isfinite(data)) else _refuse(where, data, "a number")
    if kind is int:
        return data if whole else _refuse(where, data, "a whole number")
    return data if type(data) is kind else _refuse(where, data, f"a value of type {kind.__name__}")


def _object(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        _refuse(where, data, "an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(data.keys() - fields.keys()):
        raise Unreadable(f"{where} has an unknown key {_short(unknown[0])!r}")
    without = dataclasses.MISSING
    for name, field in fields.items():
        if name not in data and field.default is without and field.default_factory is without:
            raise Unreadable(f"{where} has no {name!r}")
    return kind(**{name: typed(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(where: str, got: Any, wanted: str) -> NoReturn:
    told = type(got).__name__ if isinstance(got, dict | list | int) else _short(repr(got))
    raise Unreadable(f"{where} is {told}, wanted {wanted}")


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."
