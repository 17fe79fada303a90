"""The document of mutants says what the record holds; each survivor has a reason."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

mutants = pytest.importorskip("benchmarks.mutants", reason="only a checkout has the benchmarks")

from tests.common.documents import ROOT  # noqa: E402

DOCUMENT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
WORDS = {
    "killed by a law": "killed",
    "raises at once": "raises at once",
    "changes no bit of any result in its cases": "changes nothing",
    "its statement never ran": "never ran",
    "survived": "survived",
}


def test_the_table_and_the_share_are_those_of_the_record() -> None:
    judged = mutants.rows()
    for words, outcome in WORDS.items():
        (shown,) = re.findall(rf"^\| {re.escape(words)} \| (\d+) \|$", DOCUMENT, re.M)
        assert int(shown) == sum(row["outcome"] == outcome for row in judged), words
    killed, effective = mutants.effective(judged)
    assert f"of the {effective} that are known to compute something else, laws kill {killed}" in " ".join(
        DOCUMENT.split()
    )


def test_each_survivor_has_a_reason_and_the_equivalent_ones_are_in_the_file_of_the_command() -> None:
    survivors = [row for row in mutants.rows() if row["outcome"] == "survived"]
    assert survivors
    assert all(row["reason"] for row in survivors)
    same = {row["fault"]: row["reason"] for row in survivors if row["kind"] == mutants.SAME}
    assert same == json.loads(mutants.EQUIVALENT.read_text(encoding="utf-8"))


def test_those_that_change_nothing_and_were_read_are_counted() -> None:
    unchanged = [row for row in mutants.rows() if row["outcome"] == "changes nothing"]
    read = Counter(row["read"] for row in unchanged if "read" in row)
    assert all(row["reason"] for row in unchanged if "read" in row)
    assert (len(unchanged), dict(read)) == (59, {"equivalent": 24, "no case": 24, "other cases": 11})
    said = " ".join(DOCUMENT.split())
    assert f"Of the {len(unchanged)} that change nothing {read.total()} were read one by one" in said
    killed, effective = mutants.effective(mutants.rows())
    assert f"laws kill {killed} of {effective + read['other cases']}" in said


def test_an_effective_one_is_killed_or_computes_something_else() -> None:
    rows = [{"outcome": "killed"}, {"outcome": "raises at once"}, {"outcome": "never ran"}]
    rows += [{"outcome": "survived", "kind": kind} for kind in ("same", "noise")]
    assert mutants.effective(rows) == (2, 3)
