"""Sessions under torchrun that something ends from outside: what was found is kept, and who ended it is named."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.engines._real.contact import SILENCE_SECONDS
from tests.common.torchrun_jobs import FOUND, LASTING, job, rank_files


def kept(folder: Path, out: str) -> dict[str, Any]:
    """The report of a session that was ended, after it was looked at: what was found is in it and was printed."""
    assert "interrupted: 0 checks hold, 1 finding of 1 root, 1 not reached" in out
    data: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert (data["interrupted"], data["exit_code"]) == (True, 130)
    assert [verdict["status"] for verdict in data["verdicts"]] == ["finding"]
    return data


@pytest.mark.nightly  # by day tests/engines/test_contact.py: it waits for the minute that a node may be silent
def test_a_node_that_is_stopped_ends_the_session_with_what_was_found(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING, nodes=2, per_node=1) as (driver, other):
        driver.until(FOUND)
        other.signal(signal.SIGSTOP)
        assert driver.process.wait(SILENCE_SECONDS + 120) == 1
        (note,) = [text for text in kept(tmp_path, driver.out)["notes"] if "contact" in text]
        assert note.startswith("lost contact with rank 1 on ")
        assert "nothing was heard of it for 60 s" in note
        assert rank_files(tmp_path) == {0: 130, 1: None}
        assert "Traceback" not in driver.err.partition("failed (exitcode: 130)")[0]


@pytest.mark.nightly  # as above
def test_ranks_whose_driver_is_on_a_node_that_is_stopped_end_themselves(tmp_path: Path) -> None:
    with job(tmp_path, *LASTING, nodes=2, per_node=1) as (driver, other):
        driver.until(FOUND)
        began = other.descendants()
        driver.signal(signal.SIGSTOP)
        assert other.process.wait(SILENCE_SECONDS + 120) == 1
        assert "ends: torchrun's store was silent for 60 s" in other.err
        assert "Traceback" not in other.err.partition("failed (exitcode: 130)")[0]
        assert rank_files(tmp_path) == {0: None, 1: 130}
        assert [pid for pid in began if Path(f"/proc/{pid}").exists()] == []
