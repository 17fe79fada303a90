"""Every process of a parallel run collects all tests: what one test alone needs is imported when it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("scipy.stats", "torch._dynamo", "opacus", "transformers")
PROGRAM = f"""
import sys
import pytest
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests"])
print("COLLECTED", int(code), [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.nightly
def test_to_collect_imports_no_library_that_few_tests_need() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.stdout.splitlines()[-1] == "COLLECTED 0 []", told.stdout[-2000:]
