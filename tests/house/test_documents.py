"""What the README and docs/laws.md say of the laws is what is registered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdpcheck.adapters import load
from fsdpcheck.impl import faults
from fsdpcheck.judging.registry import chapters

README = Path(__file__).parents[2] / "README.md"
LAWS = README.parent / "docs" / "laws.md"


@pytest.mark.skipif(not README.is_file(), reason="only a checkout has the README")
def test_the_readme_names_every_chapter_and_counts_the_laws() -> None:
    text = README.read_text(encoding="utf-8")
    table = text.split("## What must hold")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}
    laws = chapters()
    assert named == {name.partition(".")[0] for name in laws}
    assert f"{len(laws)} laws in {len(named)} chapters" in table


@pytest.mark.skipif(not LAWS.is_file(), reason="only a checkout has the documents")
def test_the_document_of_laws_counts_the_faults_that_were_put_to_them() -> None:
    (said,) = re.findall(r"^Killed: of (\d+) planted faults", LAWS.read_text(encoding="utf-8"), re.MULTILINE)
    assert int(said) == len(faults.ALL), "next: put the new faults to all laws (python -m benchmarks laws)"


@pytest.mark.skipif(not LAWS.is_file(), reason="only a checkout has the documents")
@pytest.mark.parametrize("adapter", ["reference", "reference_fsdp2", "fully_shard", "fsdp1", "opacus:sound"])
def test_the_document_of_laws_says_who_promises_each(adapter: str) -> None:
    if adapter.startswith("opacus"):
        pytest.importorskip("opacus")
    lines = [line for line in LAWS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    (header, *rows) = [line.strip("| ").split(" | ") for line in lines]
    said = {row[0]: row[header.index(adapter)] != "-" for row in rows if len(row) == len(header)}
    features = load(adapter).features
    assert said == {name: not law.not_promised(features) for name, law in chapters().items()}
