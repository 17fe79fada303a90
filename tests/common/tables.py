"""One test for a table: all rows are tried, and all that are wrong are named together."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Body = Callable[..., None]


class WrongRows(AssertionError):
    """Rows of a table, by what they are called: where each went wrong, and how."""

    def __init__(self, wrong: dict[str, str], tried: int) -> None:
        self.wrong, self.tried = wrong, tried
        super().__init__(f"{len(wrong)} of {tried} rows:\n" + "\n".join(f"[{row}] {how}" for row, how in wrong.items()))


def each(
    names: str | tuple[str, ...], rows: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None
) -> Callable[[Body], Body]:
    """``pytest.mark.parametrize`` in one test, for rows that are quick: an id costs every process time.

    Fixtures are made once for all rows. Stacked, every row meets every row. A row may not skip: nobody would see it.
    """
    arguments = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    table = [row if len(arguments) > 1 else (row,) for row in rows]
    word = ids if callable(ids) else _word
    called = ["-".join(map(word, row)) for row in table] if ids is None or callable(ids) else [*ids]
    assert table, "a table without rows asserts nothing"
    assert len(called) == len(table)

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def tried(*own: Any, **fixtures: Any) -> None:
            wrong: dict[str, str] = {}
            count, first = 0, None
            for number, (name, row) in enumerate(zip(called, table, strict=True)):
                name = f"{name} (row {number})" if called.count(name) > 1 else name
                try:
                    body(*own, **fixtures, **dict(zip(arguments, row, strict=True)))
                    count += getattr(body, "rows", 1)
                except WrongRows as error:
                    wrong |= {f"{name}-{row}": how for row, how in error.wrong.items()}
                    count, first = count + error.tried, first or error
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    wrong[name] = _told(error)
                    count, first = count + getattr(body, "rows", 1), first or error
            if wrong:
                raise WrongRows(wrong, count) from first

        signature = inspect.signature(body)
        left = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        assert len(left) + len(arguments) == len(signature.parameters), f"{arguments} are no arguments of {body}"
        tried.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        tried.rows = len(table) * getattr(body, "rows", 1)  # type: ignore[attr-defined]
        return tried

    return decorate


def _told(error: BaseException) -> str:
    """The error, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    skipped = "a row may not skip: " * isinstance(error, pytest.skip.Exception)
    return f"{skipped}{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _word(value: object) -> str:
    """What pytest calls a value in an id, where it is short."""
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else str(value)[:60]
