"""How commands end: by codes that say what happened, and never by that of a finding where nothing was found."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import cast

import pytest

from fsdpcheck.cli.exits import guarded
from fsdpcheck.errors import INTERNAL, USAGE, writing
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.session.journal import Journal, journal_of
from fsdpcheck.session.plan import Plan
from tests.common.commands import run


def raising(error: Exception) -> int:
    def command() -> int:
        raise error

    return guarded(command)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("a slip"), INTERNAL, "this is an error of fsdpcheck"),
        (OSError(errno.ENOSPC, "No space left on device", "out.json"), INTERNAL, "refused: out.json: No space left"),
        (Unreadable("it is not UTF-8"), USAGE, "it is not UTF-8"),
    ],
)
def test_no_error_ends_with_the_code_of_a_finding(
    error: Exception, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert raising(error) == code
    assert said in capfd.readouterr().err


def test_settings_that_are_not_utf_8_are_told(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(b'[tool.fsdpcheck]\nadapter = ["caf\xe9"]\n')
    code, out, err = run(tmp_path, "gate")
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert "UTF-8" in err


def test_a_file_is_written_whole_a_link_stays_and_a_device_is_written_to(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "there.txt", tmp_path / "link.txt", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    writing.whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writing.whole(pipe, "through it")
    assert os.read(reader, 100) == b"through it"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "pipe", "there.txt"]


def test_a_full_disk_ends_the_keeping_and_not_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "out.json", Plan(("ddp",)))
    journal.note({"event": "error", "text": "one"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "_write", full)
    journal.note({"event": "error", "text": "two"})
    journal.note({"event": "error", "text": "three"})
    journal.leave()
    assert '"one"' in journal_of(tmp_path / "out.json").read_text()


def test_what_the_encoding_of_a_terminal_lacks_is_printed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file's name is where the locale is C."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert guarded(lambda: print("größe \udcc3") or 0) == 0  # type: ignore[func-returns-value]
    assert cast(io.BytesIO, out.buffer).getvalue() == b"gr\\xf6\\xdfe \\udcc3\n"
