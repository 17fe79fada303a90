"""docs/claims.md: every row of the ledger, with the verdict and the numbers that its check measures."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fsdpcheck.report import claims as report
from fsdpcheck.studies.claims import evaluation, registry
from fsdpcheck.studies.claims.evaluation import Row
from fsdpcheck.studies.claims.registry import Outcome
from tests.studies.claims.ledger import DOCUMENT, ELSEWHERE, verdict, written

LEDGER = (
    [f"A{n}" for n in range(1, 13)]
    + ["B1", "B2", "B3", "B4", "B4'", "B5", "B6", "B7", "B8", "B9"]
    + [f"C{n}" for n in range(1, 7)]
    + [f"D{n}" for n in range(1, 16)]
    + ["E1", "E2", "E3"]
)
ROUNDED = {"A6", "B2", "E3"}
"""Rows on real numbers whose sums round as the processor's vector units add: their digits are its own."""
LONG = {"B4'", "B9", "C2", "D13", "D15", "E1"}
"""Rows that take seconds, for processes, dozens of runs or long sequences: at night. What turns them, but for D15, is
shown by day too."""

pytestmark = pytest.mark.skipif(not DOCUMENT.is_file(), reason="needs the files of the checkout")

_NIGHTLY = [pytest.param(id, marks=pytest.mark.nightly) for id in sorted(LONG)]


def _shown(id: str, outcome: Outcome) -> str:
    """The line that the command writes for a row measured thus."""
    (row,) = registry.chosen([id])
    document = report.markdown([Row(id, row.statement, outcome.verdict, outcome.measured)])
    return next(line for line in document.splitlines() if line.startswith(f"| {id} |"))


def _without_digits(line: str) -> str:
    return re.sub(r"\d[\d.e+-]*", "#", line)


def test_every_row_of_the_ledger_has_a_check() -> None:
    assert [row.id for row in registry.all_claims()] == LEDGER


def test_the_document_has_every_row_and_counts_them() -> None:
    assert list(written()) == LEDGER
    rows = [Row(id, "", verdict(line), "") for id, line in written().items()]
    assert report.markdown(rows).splitlines()[:7] == DOCUMENT.read_text().splitlines()[:7]


@pytest.mark.parametrize("id", [*(id for id in LEDGER if id not in LONG), *_NIGHTLY])
def test_the_document_says_what_is_measured(as_it_is: Callable[[str], Outcome], id: str) -> None:
    if id in ELSEWHERE:
        pytest.skip(f"the document was measured {ELSEWHERE[id]}")
    wanted, shown = written()[id], _shown(id, as_it_is(id))
    if id in ROUNDED:
        wanted, shown = _without_digits(wanted), _without_digits(shown)
    assert shown == wanted


@pytest.mark.nightly
def test_the_ledger_measures_twice_alike() -> None:
    rows = [row for row in registry.all_claims() if row.id not in LONG]
    assert evaluation.judge(rows) == evaluation.judge(rows)
