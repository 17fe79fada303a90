"""Climbing: cases that come nearer a bound are sought, what was reached is told, and what breaks the law is found."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Case, MeshSpec, SamplerCase
from fsdpcheck.case.sampler import SamplingSpec
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.climbing import bits, told
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import BuiltSpace

_RANGE, _SOUGHT = 1 << 16, 40_000


def of_seeds(allowed: Fraction = Fraction(1), climbs: bool = True) -> Law:
    """A law that needs no ranks: seeds come near ``_SOUGHT``, and are to have ``allowed`` of the way at most."""

    def body(case: Any, run: Run) -> None:
        share = 1 - Fraction(abs(case.seed - _SOUGHT), _RANGE)
        if share > allowed:
            raise Violation("too large", got=str(share), wanted=str(allowed), where="the seed")
        run.ran.reach("a seed", share)

    law = chapters()["samplers.dealt"]
    return replace(law, name="toy.seeds", body=body, climbs=climbs, space=BuiltSpace(build=_seeds))


def _seeds(features: Features, world_sizes: tuple[int, ...]) -> st.SearchStrategy[Case]:
    return st.integers(0, _RANGE - 1).map(lambda seed: SamplerCase(SamplingSpec(), MeshSpec(), seed))


@pytest.fixture(scope="module")
def run(engine: SimulatedEngine) -> Run:
    return Run(engine, "reference")


def reached(law: Law, run: Run) -> int:
    verdict = check_law(law, run, "nightly", shrink=False)
    assert verdict.status == "holds", verdict.reason
    (text,) = verdict.reached
    return 60 if text.endswith("is reached") else int(text.rpartition("-")[2])


def test_cases_come_nearer_a_bound_than_those_that_are_drawn(run: Run) -> None:
    assert reached(of_seeds(climbs=False), run) < 16
    assert reached(of_seeds(), run) == 60


def test_a_case_that_breaks_the_law_on_the_way_is_a_finding(run: Run) -> None:
    nearly = 1 - Fraction(1, 1 << 16)
    assert check_law(of_seeds(nearly, climbs=False), run, "nightly", shrink=False).status == "holds"
    verdict = check_law(of_seeds(nearly), run, "nightly", shrink=False)
    assert verdict.status == "finding"
    assert verdict.finding is not None
    assert verdict.finding.where == "the seed"


def of_rungs() -> tuple[Law, set[int]]:
    """A law of seeds, and the rungs of a ladder up to ``_SOUGHT`` that they reached; each is a branch."""
    rungs = set[int]()

    def body(case: Any, run: Run) -> None:
        run.ran.branches = {rung for rung in range(17) if abs(case.seed - _SOUGHT) < _RANGE >> rung}
        rungs.update(run.ran.branches)

    return replace(of_seeds(climbs=False), body=body), rungs


def test_cases_run_more_branches_where_these_are_measured_than_as_many_that_are_drawn(run: Run) -> None:
    drawn, some = of_rungs()
    assert check_law(drawn, run, "nightly", shrink=False, most=600).cases == 600
    sought, more = of_rungs()
    assert check_law(sought, replace(run, measured=True), "nightly", shrink=False).cases <= 600
    assert len(some) < len(more) == 17


def test_what_is_measured_by_day_is_not_sought(run: Run) -> None:
    law, _ = of_rungs()
    assert check_law(law, replace(run, measured=True), "ci", shrink=False).cases == 60


def test_the_quick_profile_does_not_climb_and_says_what_was_reached(run: Run) -> None:
    verdict = check_law(of_seeds(), run, shrink=False)
    assert (verdict.status, verdict.cases) == ("holds", 10)
    assert verdict.reached[0].startswith("a seed: the bound is reached to 2^-")


def test_a_verdict_with_what_was_reached_goes_through_json(run: Run) -> None:
    verdict = check_law(of_seeds(), run, shrink=False, most=3)
    assert type(verdict).from_data(verdict.to_data()) == verdict


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (Fraction(0), "reached to 2^-0"),
        (Fraction(3, 4), "reached to 2^-2"),
        (1 - Fraction(1, 9), "reached to 2^-3"),
        (Fraction(1), "reached"),
        (1 + Fraction(1, 1 << 50), "reached"),
    ],
)
def test_shares_in_words(share: Fraction, words: str) -> None:
    assert told("one", share) == f"one: the bound is {words}"
    assert bits(share) >= 0
