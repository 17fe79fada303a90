"""Code by reference, from files of whatever name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fsdpcheck.loading import references

KIND = references.Kind("thing")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes")
def test_a_file_is_loaded_whose_name_the_locale_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff ff.py")
    path.write_text("value = 7\n")
    assert references.load(f"{path}:value", KIND) == 7
