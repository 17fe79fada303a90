"""What collecting the tests imports: nothing heavy that few need, and nothing that only a checkout has."""

from __future__ import annotations

import ast
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


def _skipped_before_imported(source: str) -> bool:
    """Whether a test module says, before it imports benchmarks at its top, that it is skipped where there are none."""
    for statement in ast.parse(source).body:
        if "importorskip" in (text := ast.unparse(statement)) and "benchmarks" in text:
            return True
        if isinstance(statement, ast.Import | ast.ImportFrom) and "benchmarks" in text:
            return False
    return True


def test_modules_are_collected_where_no_benchmarks_are() -> None:
    """The tests of a wheel are collected without the checkout on the path: there is no ``benchmarks``."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 200, "the tests stand elsewhere"
    wrong = [str(path.relative_to(ROOT)) for path in files if not _skipped_before_imported(path.read_text("utf-8"))]
    assert not wrong, 'first comes pytest.importorskip("benchmarks.…", reason="only a checkout has the benchmarks")'


@pytest.mark.parametrize(
    ("source", "collected"),
    [
        ("from benchmarks import night\n", False),
        ("import benchmarks.night\npytest.importorskip('benchmarks.night')\n", False),
        ("pytest.importorskip('benchmarks.night')\nfrom benchmarks import night\n", True),
        ("def test_it():\n    from benchmarks import night\n", True),
        ("night = pytest.importorskip('benchmarks.night')\n", True),
    ],
)
def test_what_of_a_module_is_looked_at(source: str, collected: bool) -> None:
    assert _skipped_before_imported(source) is collected
