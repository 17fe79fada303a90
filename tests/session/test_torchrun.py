"""A session under torchrun: the file that each rank writes of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpcheck.session import torchrun


def test_the_file_of_a_rank_that_is_killed_says_that_it_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    torchrun._RankFile(tmp_path / "ranks")
    assert json.loads((tmp_path / "ranks" / "rank1.json").read_text()) == {"schema": 1, "rank": 1, "exit_code": None}
