"""A file is written whole or not at all, and links stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.errors import writing


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    writing.whole(link, "after")
    assert (link.is_symlink(), target.read_text()) == (True, "after")


def test_links_that_name_each_other_are_an_oserror(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.symlink_to(two)
    two.symlink_to(one)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        writing.whole(one, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_bytes_of_file_names_that_are_no_utf_8_are_written_by_their_numbers(tmp_path: Path) -> None:
    writing.whole(tmp_path / "report", "in \udcff.py")
    assert (tmp_path / "report").read_text(encoding="utf-8") == "in \\udcff.py"
