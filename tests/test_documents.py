"""What the README says of the laws is what is registered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdpcheck.law import chapters

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not README.is_file(), reason="only a checkout has the README")
def test_the_readme_names_every_chapter_and_counts_the_laws() -> None:
    text = README.read_text(encoding="utf-8")
    table = text.split("## What must hold")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}
    laws = chapters()
    assert named == {name.partition(".")[0] for name in laws}
    assert f"{len(laws)} laws in {len(named)} chapters" in table
