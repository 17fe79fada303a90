"""Which layers of torch are judged exactly in a user's model, and that the document says so."""

from __future__ import annotations

from pathlib import Path

import pytest

exact_layers = pytest.importorskip("benchmarks.exact_layers", reason="only a checkout has the benchmarks")
from benchmarks.exact_layers import DOCUMENT, LAYERS, document, why_not  # noqa: E402

TEXT = " ".join(Path(DOCUMENT).read_text(encoding="utf-8").split())


def test_the_document_counts_them_all() -> None:
    assert f"Of {len(LAYERS)} layers and functions that were tried" in TEXT


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GRU", ""),
        ("MultiheadAttention with a mask of booleans", ""),
        ("AvgPool2d", ""),
        ("exp", "cannot express aten.exp.default: it has no rule"),
    ],
)
def test_some_of_them_by_day(name: str, why: str) -> None:
    found = why_not(name)
    assert (why in found, bool(found)) == (True, bool(why)), found


@pytest.mark.nightly
def test_the_document_says_which_are() -> None:
    why = {name: why_not(name) for name in LAYERS}
    exact, others = ([name for name in LAYERS if bool(why[name]) == is_other] for is_other in (False, True))
    assert document(exact, others) in TEXT, why
