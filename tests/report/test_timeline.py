"""The timeline of a run: where each bar begins and ends, and who waits."""

from __future__ import annotations

import pytest

from fsdpcheck.errors import UsageError
from fsdpcheck.execution.trace import Collective
from fsdpcheck.report import timeline
from fsdpcheck.traces.job import Job, of_ranks

CALL = Collective("all_reduce", (0, 1), "0", 0, where="train.py:7")
NEXT = Collective("barrier", (0, 1), "0", 1, subject="blocks.0")


def _bars(job: Job, width: int = 10) -> list[str]:
    head, *lines = timeline.drawn(job, width)
    assert head.startswith(timeline.LEGEND)
    return lines


def _times(job: Job) -> list[str]:
    return [line.split("|")[1] for line in _bars(job)]


def test_a_bar_lasts_from_the_issue_to_the_end_and_shows_the_wait() -> None:
    """Rank 0 issues at 0, waits from 2; rank 1 comes at 3; the second call nobody but rank 1 makes."""
    job = of_ranks({0: (CALL,), 1: (CALL, NEXT)}, {0: [(0, 2, 5)], 1: [(3, 4, 6), (7, 8)]}, None)
    assert _times(job) == ["I-====    ", "   I===   ", "       I=X"]
    assert [line.rpartition("|")[2] for line in _bars(job)] == [" train.py:7", " train.py:7", ""]
    assert [line.partition("|")[0].split() for line in _bars(job)] == [
        ["all_reduce", "#0,", "group", "0", "rank", "0"],
        ["rank", "1"],
        ["barrier", "of", "blocks.0", "#1,", "group", "0", "rank", "1"],
    ]


def test_a_call_never_waited_for_is_under_way_until_all_have_come() -> None:
    job = of_ranks({0: (CALL,), 1: (CALL,)}, {0: [(0,)], 1: [(4,)]}, None)
    assert _times(job) == ["I----     ", "    I     "]


def test_a_long_run_is_drawn_to_the_width() -> None:
    job = of_ranks({0: (CALL,), 1: (CALL,)}, {0: [(0, 1, 999)], 1: [(998,)]}, None)
    assert _times(job) == ["I=========", "         I"]


def test_a_job_without_times_cannot_be_drawn() -> None:
    with pytest.raises(UsageError, match="no common time"):
        list(timeline.drawn(Job(1, {0: (CALL,)}, {}), 10))
    assert _bars(of_ranks({0: ()}, {0: []}, None)) == []
