"""Reports for others: each program still shows the defect that it is about, on the release that is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "docs" / "upstream"
REPORTS = sorted(HERE.glob("*.py"))
LONGEST = 60
"""Lines of a report."""

pytestmark = pytest.mark.skipif(not HERE.is_dir(), reason="only a checkout has the documents")


def _ran(report: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launcher, str(report)], capture_output=True, text=True, check=False)


def test_every_report_stands_in_the_list_and_is_a_short_program_of_its_own() -> None:
    listed = set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {report.name for report in REPORTS}
    assert len(REPORTS) > 1
    for report in REPORTS:
        text = report.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST
        assert not re.search(r"^\s*(import|from) fsdpcheck", text, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
def test_a_report_still_shows_its_defect(report: Path) -> None:
    import torch

    if report.stem.startswith("opacus"):
        pytest.importorskip("opacus")
    ran = _ran(report)
    what = "what docs/upstream/README.md says that it keeps from being checked"
    assert ran.returncode != 0, f"mended in torch {torch.__version__}: next: drop {what}"
    assert "RuntimeError" in ran.stderr or "view_groups" in ran.stderr, ran.stderr
