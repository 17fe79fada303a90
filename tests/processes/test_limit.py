"""What a run may use up: what the environment says when an engine is made, wherever its modules were imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.processes.limit import Limit, limit_seconds
from tests.common.commands import run

COMPUTES_FOR_EVER = """
from fsdpcheck.adapters.builtin.ddp import adapter as ddp


class ForEver:
    name, features = "for_ever", ddp.features

    def build(self, model, setup):
        while True:
            pass


from dataclasses import replace
ForEver.features = replace(ddp.features, promises=frozenset({"plain"}))
adapter = ForEver()
"""


def test_the_environment_counts_when_an_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDPCHECK_LIMIT_SECONDS", raising=False)
    assert limit_seconds() == Limit().seconds == 600
    monkeypatch.setenv("FSDPCHECK_LIMIT_SECONDS", "7")
    assert limit_seconds() == Limit().seconds == SimulatedEngine()._settings.limit_seconds == 7
    assert Limit(30).seconds == SimulatedEngine(limit_seconds=30)._settings.limit_seconds == 30
    monkeypatch.setenv("FSDPCHECK_LIMIT_SECONDS", "soon")
    with pytest.raises(UsageError, match="'soon'; wanted a number of seconds"):
        SimulatedEngine()


def test_a_session_whose_workers_are_forked_keeps_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loops.py").write_text(COMPUTES_FOR_EVER)
    monkeypatch.setenv("FSDPCHECK_LIMIT_SECONDS", "1")
    code, out, err = run(tmp_path, "run", "--adapter", "loops.py:adapter", "--law", "training.plain", "--jobs", "1")
    assert code == 4, out + err
    assert "are more than the 1 s that a run may use up" in out
    assert "loops.py:9" in out
