"""Every fortieth of the sessions of ``python -m benchmarks sessions`` ends, leaves nothing and is green in truth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_sessions_on_what_misbehaves_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "sessions", "60", str(tmp_path / "rows.jsonl"), "--shard", "1/40"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].endswith(
        " sessions: 0 did not end, 0 processes and folders were left behind, 0 were green in error, 0 wrote no JSON"
    ), told.stdout


def test_green_is_right_of_what_all_ranks_call_alike_and_of_nothing_that_one_calls() -> None:
    sessions = pytest.importorskip("benchmarks.sessions")
    row = {"code": 0, "processes": 0, "folders": 0, "json": True}
    found = {what: sessions.wrong({**row, "what": what}) for what in ("calls_alone_on_all", "calls_alone_on_one")}
    assert found == {"calls_alone_on_all": "", "calls_alone_on_one": "green"}
