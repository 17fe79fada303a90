"""Each test of which rows are left for the night is there, has as many, and what is said to see it by day exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.common.by_day import TESTS, is_by_day

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_each_test_with_rows_for_the_night_has_them() -> None:
    files = sorted({f"tests/{name.partition('::')[0]}" for name in TESTS})
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *files]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    rows = Counter(line.partition("[")[0].rpartition("tests/")[2] for line in told.splitlines() if "::" in line)
    last = {name: max(days) if isinstance(days, list) else 0 for name, days in TESTS.items()}
    assert {name: rows[name] for name in TESTS if rows[name] <= last[name]} == {}


def test_all_of_them_are_there() -> None:
    missing = []
    for test in TESTS:
        file, _, name = test.partition("::")
        if not re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(test)
    assert not missing


@pytest.mark.parametrize(("days", "rows"), [([0, 4], {0, 4}), ({"every": 2}, {0, 2, 4}), ("its file", set())])
def test_rows_are_listed_or_each_nth_or_none(days: list[int] | dict[str, int] | str, rows: set[int]) -> None:
    assert {row for row in range(5) if is_by_day(days, row)} == rows


def test_what_sees_by_day_what_runs_by_night_is_there() -> None:
    """A folder or file of tests or properties, or tests of the same file by words of their names."""
    for name, days in TESTS.items():
        if not isinstance(days, str) or days == "its file":
            continue
        file = name.partition("::")[0]
        here = (ROOT / "tests" / file).read_text(encoding="utf-8")
        places = [ROOT / days, ROOT / "tests" / days]
        assert any(place.exists() for place in places) or days.replace(" ", "_") in here, (name, days)
