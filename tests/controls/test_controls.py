"""Controls: right variants are put in place, and no law reports any of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl import faults
from fsdpcheck.judging.registry import chapters
from tests.controls.variants import ALL

controls = pytest.importorskip("benchmarks.controls", reason="only a checkout has the benchmarks")

DAILY = (
    ("factor_by_where", "clipping.factors"),
    ("shards_are_aligned", "padding.zero"),
    ("upper_draws", "samplers.poisson-once"),
    ("every_other_unit", "training.plain"),
    ("prefetched", "training.plain"),
    ("a_barrier_before_each_reduction", "collectives.plain"),
    ("divided_first_by_a_hook", "training.gradients"),
)


def test_every_control_says_why_it_is_right_and_alters_one_place() -> None:
    assert len(ALL) >= 55
    for name, control in ALL.items():
        assert control.why, name
        assert controls.laws_of(control), name
        for change in control.changes:
            assert change.old != change.new
            assert change.altered("hit").co_name == change.target.__name__, name
            assert change.lines[0] > 0, name


def test_a_control_is_in_place_inside_the_block_only() -> None:
    control = ALL["norm_by_power"]
    (change,) = control.changes
    before = change.target.__code__
    with control():
        assert change.target.__code__ is not before
    assert change.target.__code__ is before


@pytest.mark.parametrize(("name", "law"), DAILY)
def test_nothing_is_reported_of_a_control(engine: SimulatedEngine, name: str, law: str) -> None:
    row = controls.judged(engine, ALL[name], chapters()[law], most=3)
    assert (row["status"], row["reported"], row["hit"]) == ("holds", "", True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_reported_of_any_control(
    engine: SimulatedEngine, name: str, record_property: Callable[[str, object], None]
) -> None:
    """The record of the night keeps how many cases that were."""
    rows = [
        {"control": name, "law": law.name, **controls.judged(engine, ALL[name], law)}
        for law in controls.laws_of(ALL[name])
    ]
    record_property("cases", sum(row["cases"] for row in rows if row["hit"]))
    assert [controls.told(row) for row in rows if row["status"] != "holds"] == []
    assert any(row["hit"] for row in rows)


def test_a_report_would_be_told() -> None:
    row = {"control": "c", "law": "l", "status": "finding", "cases": 3, "hit": True, "reported": "what"}
    right = {**row, "status": "holds", "reported": "", "hit": False}
    assert controls.told(row) == "c l: finding, 3 cases what"
    assert controls.told(right) == "c l: holds, 3 cases, never hit"
    assert controls.summary([row, right]) == "1 controls, 3 cases: 1 reported"
    assert controls.by_night([]) == "by night: 0 controls, 0 cases: 0 reported"
    night = [
        {"part": "tests/controls", "judged": {"t::of_any[a]": 10, "t::of_any[b]": 5}, "findings": []},
        {"part": "tests/controls", "judged": {"t::of_any[a]": 7}, "findings": ["t::of_any[a]"]},
        {"part": "tests/laws", "judged": {"t": 3}, "findings": ["t"]},
        {"part": "tests/controls", "items": {}, "findings": []},
    ]
    assert controls.by_night(night) == "by night: 2 controls, 22 cases: 1 reported"
    assert faults.ALL, "planted faults are what the same laws do report"
