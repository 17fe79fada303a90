"""The table of implementations that come with an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck import adapters

implementations = pytest.importorskip("benchmarks.implementations", reason="only of a checkout")
ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "implementations.md").read_text(encoding="utf-8")


def test_the_document_has_the_table_of_honest_ones() -> None:
    rows = implementations.Kept(str(implementations.RECORD), "adapter", "ranks").rows
    honest = [row for row in rows if row["honest"]]
    assert all((row["held"], row["findings"]) == (row["promised"], []) for row in honest)
    assert "\n".join(implementations.table(honest)) in DOCUMENT


def test_the_document_has_the_table_of_defects_and_each_finding_was_seen_on_gloo() -> None:
    rows = implementations.Kept(str(implementations.RECORD), "adapter", "ranks").rows
    defects = [row for row in rows if not row["honest"]]
    assert {row["adapter"] for row in defects} == {*implementations._DEFECTS}
    assert {row["adapter"] for row in defects if not row["findings"]} == {"fsdp1:passed_on"}
    assert {word for row in defects for word in row["confirmed"]} == {"yes"}
    assert "\n".join(implementations.table(defects)) in DOCUMENT


def test_every_adapter_is_described_and_in_the_table() -> None:
    """A line beside its name, and a row of its own or of a variant of it."""
    for name in adapters.names():
        assert DOCUMENT.count(f"`{name}`") + DOCUMENT.count(f"| `{name}:") >= 2, name


def test_comments_docstrings_and_blank_lines_are_no_lines_of_code() -> None:
    assert implementations.code_lines('"""Of a\nmodule."""\n\n# said\nx = 1  # one\ny = """a\nb"""\n') == 3
