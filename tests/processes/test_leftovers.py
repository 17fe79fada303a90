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
    gone, mine = f"fsdpcheck-{process.pid}.123456789.0-abcdefg1", f"fsdpcheck-{os.getpid()}.123456789-abcdefg2"
    written, fresh = f"fsdpcheck-{process.pid}.123456789-abcdefg3", f"fsdpcheck-{process.pid}.1234567-abcdefg_"
    others = {
        "fsdpcheck-0.1.0", "fsdpcheck-0.1.0-src", "fsdpcheck-2026-11-01", "fsdpcheck-notes",
        f"fsdpcheck-{process.pid}-abcdefgh",
        f"fsdpcheck-{process.pid}.1-abcdefgh", f"fsdpcheck-{process.pid}.123456789-notes",
    }  # fmt: skip
    for name in (gone, mine, written, fresh, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text("")
    for path in tmp_path.rglob("*"):
        if path.parent.name != written and path.name != fresh:
            os.utime(path, (old, old))
    monkeypatch.setattr(leftovers.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    leftovers.remove_abandoned()
    assert len([*tmp_path.iterdir()]) == 4 + len(others), "of another user"
    monkeypatch.undo()
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    (link := tmp_path / f"fsdpcheck-{process.pid}.123456789-abcdefg4").symlink_to(tmp_path / mine)
    leftovers.remove_abandoned()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine, written, fresh, link.name, *others}
    assert any((tmp_path / mine).iterdir())
