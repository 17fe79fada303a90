"""What sessions that were killed have left on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdpcheck.processes import leftovers


def test_folders_are_removed_of_a_process_that_is_gone_and_that_nobody_wrote_to_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    old = time.time() - 2 * leftovers._ABANDONED_S
    gone, mine = f"fsdpcheck-{process.pid}.1.0-a", f"fsdpcheck-{os.getpid()}.1.0-b"
    written, fresh = f"fsdpcheck-{process.pid}-c", f"fsdpcheck-{process.pid}.2.0-d"
    for name in (gone, mine, written, fresh, "fsdpcheck-notes-e", f"fsdpcheck-{process.pid}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text("")
    for path in tmp_path.rglob("*"):
        if path.parent.name != written and path.name != fresh:
            os.utime(path, (old, old))
    leftovers.remove_abandoned()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine, written, fresh, "fsdpcheck-notes-e", f"fsdpcheck-{process.pid}"}
