"""Code by reference, from files of whatever name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fsdpcheck.errors import UsageError
from fsdpcheck.loading import references

KIND = references.Kind("thing")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes")
def test_a_file_is_loaded_whose_name_the_locale_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff ff.py")
    path.write_text("value = 7\n")
    assert references.load(f"{path}:value", KIND) == 7


def test_a_stale_copy_of_what_lies_beside_a_file_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PYTHONPATH has it: the import path has the copy first."""
    for folder, value in (("here", 1), ("stale", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sharded_twin.py").write_text(f"value = {value}\n")
    adapter = tmp_path / "here" / "adapter.py"
    adapter.write_text("from sharded_twin import value\n")
    monkeypatch.syspath_prepend(tmp_path / "stale")
    with pytest.raises(UsageError) as raised:
        references.load(f"{adapter}:value", KIND)
    assert "imports another sharded_twin than lies beside it" in str(raised.value)
    assert str(tmp_path / "stale" / "sharded_twin.py") in str(raised.value)
    (adapter.parent / "second.py").write_text("import random\nvalue = 3\n")
    (adapter.parent / "random.py").write_text("")  # Python's own comes first, and is meant
    assert references.load(f"{adapter.parent / 'second.py'}:value", KIND) == 3
    (adapter.parent / "fsdpcheck").mkdir()  # as in a checkout, where another one is installed and runs
    (adapter.parent / "fsdpcheck" / "__init__.py").write_text("")
    (adapter.parent / "third.py").write_text("from fsdpcheck.errors import UsageError as value\n")
    assert references.load(f"{adapter.parent / 'third.py'}:value", KIND) is UsageError


def test_a_module_that_two_files_have_beside_them_is_one_in_a_process_and_the_second_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a function of the second imports it: what is imported already comes first."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper_twin.py").write_text(f"value = {folder!r}\n")
        text = "from helper_twin import value\n" if folder == "first" else "def value():\n    import helper_twin\n"
        (tmp_path / folder / "adapter.py").write_text(text)
    assert references.load(f"{tmp_path / 'first' / 'adapter.py'}:value", KIND) == "first"
    with pytest.raises(UsageError) as raised:
        references.load(f"{tmp_path / 'second' / 'adapter.py'}:value", KIND)
    del sys.modules["helper_twin"]
    assert f"got     {tmp_path / 'first' / 'helper_twin.py'}" in str(raised.value)
    assert f"wanted  {tmp_path / 'second' / 'helper_twin.py'}" in str(raised.value)


def test_a_module_of_ours_is_loaded_without_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the console script load probes, and it was reported that they leave the import path changed."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and Path(entry) != Path.cwd()])
    before = list(sys.path)
    assert references.load("fsdpcheck.errors:UsageError", KIND) is UsageError
    assert sys.path == before
    references.load("json:dumps", KIND)
    assert sys.path == [str(Path.cwd()), *before]
