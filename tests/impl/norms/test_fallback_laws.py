"""The laws of private training hold when the fallback takes the place of every rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

HERE = Path(__file__).with_name("fallback_everywhere.py")
"""Loaded by its path; the install beside it is then found by its module's name."""


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    engine = SimulatedEngine()
    yield engine
    engine.close()


BY_DAY = ("clipping.norms", "training.private-clipped")


@pytest.mark.parametrize(
    ("law", "profile", "least"),
    [pytest.param(law, "quick", 10, marks=[pytest.mark.nightly] * (law == "clipping.norms")) for law in BY_DAY]
    + [
        pytest.param(law, "ci", 51, marks=pytest.mark.nightly)
        for law in (*BY_DAY, "norms.mixed", "deferred.equals-immediate")
    ],
)
def test_the_law_holds(engine: SimulatedEngine, law: str, profile: str, least: int) -> None:
    run = Run(engine, f"{HERE}:adapter", installs=("fallback_everywhere:installed",))
    verdict = check_law(chapters()[law], run, profile)
    assert verdict.status == "holds", verdict.reason or verdict.finding
    assert verdict.cases >= least
