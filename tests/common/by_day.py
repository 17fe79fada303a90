"""Which rows of a long test run by day: those that ``by_day.toml`` says. All of them run by night."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

Days = list[int] | dict[str, int] | str
"""Rows, each n-th row, or what else sees by day what the test is about."""

_TOML: Final = Path(__file__).with_suffix(".toml")
TESTS: Final[dict[str, Days]] = {
    f"{file}::{test}": days
    for file, tests in tomllib.loads(_TOML.read_text(encoding="utf-8")).items()
    for test, days in tests.items()
}
"""Test, below tests/ -> when its rows run."""


def is_by_day(days: Days, row: int) -> bool:
    if isinstance(days, dict):
        return row % days["every"] == 0
    return not isinstance(days, str) and row in days


def by_night(items: Iterable[pytest.Item]) -> None:
    """Mark all other rows."""
    seen: Counter[str] = Counter()
    for item in items:
        _, _, below = item.nodeid.partition("[")[0].rpartition("tests/")
        if below in TESTS:
            if not is_by_day(TESTS[below], seen[below]):
                item.add_marker(pytest.mark.nightly)
            seen[below] += 1
