"""A session under torchrun: the file that each rank writes of itself, and what is kept of one that is ended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpcheck.session import torchrun
from fsdpcheck.session.plan import Plan


def test_the_file_of_a_rank_that_is_killed_says_that_it_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    torchrun._RankFile(tmp_path / "ranks")
    assert json.loads((tmp_path / "ranks" / "rank1.json").read_text()) == {"schema": 1, "rank": 1, "exit_code": None}


@pytest.fixture
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


ENGINE = SimpleNamespace(processor_seconds=0.0, close=lambda: None)
RANKS = SimpleNamespace(known=(), contact=None, engine=lambda *_: ENGINE)


@pytest.mark.parametrize("at", ["while it is judged", "when it has ended", "never"])
@pytest.mark.parametrize("interrupted", [True, False], ids=["a rank is gone", "all are there"])
def test_a_signal_at_whatever_moment_leaves_what_was_found(
    at: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    """The engine may have ended the session already, for a rank that is gone, when torchrun tells rank 0 to end too."""
    heard: list[str] = []

    def told_session(plan: Plan, emit: Any, engine: Any) -> dict[str, Any]:
        try:
            emit({"event": "note", "text": "found"})
            if at == "while it is judged":
                os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            return {"event": "end", "interrupted": True}
        if at == "when it has ended":
            os.kill(os.getpid(), signal.SIGTERM)
        return {"event": "end", "interrupted": interrupted}

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torchrun, "told_session", told_session)
    monkeypatch.setattr(torchrun, "ranks", lambda: RANKS)
    monkeypatch.setattr(torchrun, "fork_servers_of", lambda _: None)
    monkeypatch.setattr(torchrun, "_to_write", [])
    plan = Plan(adapters=("reference",), laws=("training.plain",), engine="torchrun")
    try:
        ledger = torchrun.session(plan, lambda ledger, event: heard.append(event["event"]))
    except KeyboardInterrupt:
        pytest.fail("the session ended by the signal, with no report")
    assert heard == ["note", "end"]
    assert ledger.notes == ("found",)
    assert ledger.interrupted == (interrupted or at != "never")
    os.kill(os.getpid(), signal.SIGTERM)  # while the report is written: it is not heeded
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
