"""Each test of which rows are left for the night is there, and has as many."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.common.by_day import ROWS

TESTS = Path(__file__).parents[1]


@pytest.mark.nightly
def test_each_test_with_rows_for_the_night_has_them() -> None:
    files = sorted({str(TESTS / name.partition("::")[0]) for name in ROWS})
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *files]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=TESTS.parent).stdout
    rows = Counter(line.partition("[")[0].rpartition("tests/")[2] for line in told.splitlines() if "::" in line)
    short = {name: rows[name] for name, days in ROWS.items() if rows[name] <= max(days, default=0)}
    assert short == {}
