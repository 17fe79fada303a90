"""The documents as a site: each has its place, and nightly it is built, where Sphinx is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="only a checkout has the documents")


def test_every_document_is_a_page_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [name for block in re.findall(r"^:hidden:\n(.*?)^```", index, re.M | re.S) for name in block.split()]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} - {"index", "README"}
    assert sorted(listed) == sorted(pages), "next: its name in a toctree of docs/index.md"


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_a_broken_link_is_one(tmp_path: Path) -> None:
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed)
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E"]
    done = subprocess.run([*build, str(DOCS), str(tmp_path / "site")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Features" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    (tmp_path / "index.md").write_text("# Page\n\n[lost](nowhere.md)\n")
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser']")
    done = subprocess.run([*build, str(tmp_path), str(tmp_path / "other")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr
