"""One test for a table: all rows are tried, and all that are wrong are named together.

The rows are written down, or they are settings of which by day every pair is tried, and by night every combination.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    arguments = _split(names)
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

        tried.__signature__ = _without(body, arguments)  # type: ignore[attr-defined]
        tried.rows = len(table) * getattr(body, "rows", 1)  # type: ignore[attr-defined]
        return tried

    return decorate


def every_pair(
    settings: Mapping[str, Iterable[Any]], unless: Callable[[Mapping[str, Any]], bool] = lambda row: False
) -> Callable[[Body], Body]:
    """A test of few combinations of settings, in which every pair of values occurs, and a nightly one of all.

    ``settings`` maps a name to its values, or several names ("a, b") to tuples of values that only occur together.
    A combination of which ``unless`` is true is left out of both.
    """
    values = {_split(names): [*rows] for names, rows in settings.items()}
    arguments = tuple(itertools.chain(*values))

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def tried(*own: Any, combined: str, **fixtures: Any) -> None:
            numbered = itertools.product(*(range(len(rows)) for rows in values.values()))
            joined = {numbers: _joined(values, numbers) for numbers in numbered}
            left = [numbers for numbers, row in joined.items() if not unless(dict(zip(arguments, row, strict=True)))]
            rows = [joined[numbers] for numbers in (pairwise(left) if combined == "pairs" else left)]
            each(arguments, rows if len(arguments) > 1 else [row for (row,) in rows])(body)(*own, **fixtures)

        own = inspect.Parameter("combined", inspect.Parameter.KEYWORD_ONLY)
        signature = _without(body, arguments)
        parameters = [*signature.parameters.values(), own]
        tried.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("combined", ["pairs", pytest.param("all", marks=pytest.mark.nightly)])(tried)

    return decorate


def pairwise(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of the rows, in which every two values are together that are together in one of all.

    The next one is always the first of those that have the most pairs that are in none yet.
    """
    pairs = {row: frozenset(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set[Any]().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def _joined(values: Mapping[tuple[str, ...], list[Any]], numbers: Sequence[int]) -> tuple[Any, ...]:
    """The row of the values that have these numbers."""
    found: list[Any] = []
    for (names, rows), number in zip(values.items(), numbers, strict=True):
        found += rows[number] if len(names) > 1 else [rows[number]]
    return tuple(found)


def _split(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names


def _without(body: Body, arguments: tuple[str, ...]) -> inspect.Signature:
    """The signature of what is left to give."""
    signature = inspect.signature(body)
    left = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
    assert len(left) + len(arguments) == len(signature.parameters), f"{arguments} are no arguments of {body}"
    return signature.replace(parameters=left)


def _told(error: BaseException) -> str:
    """The error, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    skipped = "a row may not skip: " * isinstance(error, pytest.skip.Exception)
    return f"{skipped}{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _word(value: object) -> str:
    """What pytest calls a value in an id, where it is short."""
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else str(value)[:60]
