"""What an implementation raises is told as what it is, whatever its class is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

NAMES = ("NotSupported", "AdapterError", "NotExact", "Refused", "NoProgress", "Interrupted", "UsageError")
"""As they stand in the toy."""
TOY = Path(__file__).parents[1] / "toys" / "raising.py"


def _verdict(engine: SimulatedEngine, adapter: str) -> Verdict:
    run = Run(engine, f"{TOY}:{adapter}")
    return check_law(chapters()["training.plain"], run, world_sizes=(1,), most=3, shrink=False)


@pytest.mark.parametrize("owner", ["own", "our"])
def test_what_a_step_raises_is_a_finding_by_whatever_name(engine: SimulatedEngine, owner: str) -> None:
    """But what breaks the protocol in words of ours: AdapterError and NotSupported."""
    for name in NAMES:
        verdict = _verdict(engine, f"{owner}_{name}")
        ours = owner == "our" and name in ("AdapterError", "NotSupported")
        assert (verdict.status, verdict.exit_code) == (("error", 2) if ours else ("finding", 1)), (name, verdict.reason)
        said = verdict.reason if verdict.finding is None else verdict.finding.got
        assert "said by the user" in said, name


def test_an_error_that_cannot_be_told_is_an_error_all_the_same(engine: SimulatedEngine) -> None:
    verdict = _verdict(engine, "unspeakable")
    assert (verdict.status, verdict.exit_code) == ("error", 2)
    assert "Unspeakable" in verdict.reason


def test_features_are_read_once(engine: SimulatedEngine) -> None:
    assert _verdict(engine, "late").status == "holds"
