"""The distinguishing test: Gaussian trainings are not told apart, and noise or clipping that is left out is seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fsdpcheck.adapters.builtin.reference import Reference
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks import distinguishing
from fsdpcheck.checks.distinguishing import (
    JUDGED,
    LARGE,
    TAUGHT,
    apart,
    assert_not_told_apart,
    canaries,
    trials,
    without_canary,
)
from fsdpcheck.exact import binomial
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.findings.violation import Violation

(ALONE,) = trials(Reference.features, (1,))
ALARM = 1e-6


def trainings(case: TrainingCase, moved: float, noise: float, first: int, again: bool = False) -> list[Execution]:
    """Two steps of two numbers each: ``moved`` along a direction of each step, and noise, the same in both if told."""
    found = []
    for seed in range(TAUGHT + JUDGED):
        draws = torch.randn(2, 2, generator=torch.Generator().manual_seed(1000 * first + seed), dtype=torch.float64)
        draws[1] = draws[0] if again else draws[1]
        towards = torch.tensor([[0.6, 0.8], [1.0, 0.0]], dtype=torch.float64)
        steps = [StepRecord({"weight": values}) for values in moved * towards + noise * draws]
        found.append(Execution("made up", RunRequest(case, "made up"), [RankResult(0, {}, steps)]))
    return found


def judged(moved: float, noise: float, again: bool = False) -> None:
    assert_not_told_apart(ALONE, pairs(moved, noise, again))


def pairs(moved: float, noise: float, again: bool = False, first: int = 1) -> Iterator[tuple[Execution, Execution]]:
    present, absent = trainings(ALONE, moved, noise, first, again), trainings(ALONE, 0.0, noise, first + 1, again)
    return zip(present, absent, strict=True)


def test_honest_trainings_are_not_told_apart() -> None:
    judged(moved=1.0, noise=3.0)


def test_no_more_trainings_are_asked_for_than_decide() -> None:
    left = pairs(moved=1.0, noise=3.0)
    assert_not_told_apart(ALONE, left)
    assert JUDGED // 2 < len(list(left)) < JUDGED


def test_what_is_not_asked_for_would_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> list[str]:
        return [_told(moved, first) for moved in (1.0, 4.0, 5.0, 6.0) for first in range(0, 12, 2)]

    early = told()
    monkeypatch.setattr(distinguishing, "_is_decided", lambda *_: False)
    assert early == told()
    assert 0 < sum(map(bool, early)) < len(early)


def _told(moved: float, first: int) -> str:
    try:
        assert_not_told_apart(ALONE, pairs(moved, 3.0, first=first))
    except Violation as violation:
        return violation.got
    return ""


def test_noise_that_is_missing_is_named() -> None:
    with pytest.raises(Violation, match="are told apart") as caught:
        judged(moved=1.0, noise=0.0)
    assert caught.value.cause.startswith("all trainings end alike")


def test_a_record_that_is_not_clipped_is_named() -> None:
    with pytest.raises(Violation, match="are told apart") as caught:
        judged(moved=LARGE, noise=3.0)
    assert "without clipping" in caught.value.cause


@pytest.mark.parametrize(("moved", "noise"), [(1.0, 0.5), (6.0, 3.0)])
def test_noise_of_a_sixth_and_a_record_of_six_times_its_weight_are_found(moved: float, noise: float) -> None:
    with pytest.raises(Violation, match="are told apart"):
        judged(moved, noise)


def test_noise_that_comes_again_is_found_though_each_step_has_enough() -> None:
    with pytest.raises(Violation, match="are told apart"):
        judged(moved=1.0, noise=3.0, again=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_tell_as_much_as_any(value: float) -> None:
    """Where only trainings with the record end so; and one such among those that teach hides nothing."""
    present, absent = _spoiled(1.0), trainings(ALONE, 0.0, 3.0, 2)
    for run in present:
        run.ranks[0].steps[1].params["weight"][0] = value
    with pytest.raises(Violation, match="are told apart"):
        assert_not_told_apart(ALONE, zip(present, absent, strict=True))
    present = _spoiled(LARGE)
    present[3].ranks[0].steps[0].params["weight"][1] = value
    with pytest.raises(Violation, match="are told apart"):
        assert_not_told_apart(ALONE, zip(present, absent, strict=True))


def _spoiled(moved: float) -> list[Execution]:
    """Trainings with the record as the law has them, of which it is not asked that all they show is finite."""
    found = trainings(ALONE, moved, 3.0, 1)
    for run in found:
        run.request = RunRequest(ALONE, "made up", spoiled=canaries(ALONE))
    return found


def test_every_rank_is_looked_at() -> None:
    one, other = trainings(ALONE, 1.0, 3.0, 1), trainings(ALONE, 0.0, 3.0, 2)
    bare = trainings(ALONE, 1.0, 0.0, 3), trainings(ALONE, 0.0, 0.0, 4)
    case = replace(ALONE, mesh=replace(ALONE.mesh, dp_shard=2), layout=replace(ALONE.layout, lists=((0,), (1,))))
    runs = [[*map(_beside, own, more)] for own, more in zip((one, other), bare, strict=True)]
    for run in (*runs[0], *runs[1]):
        run.request = RunRequest(case, "made up")
    with pytest.raises(Violation) as caught:
        assert_not_told_apart(case, zip(*runs, strict=True))
    assert caught.value.where.startswith("rank 1")


def _beside(one: Execution, other: Execution) -> Execution:
    return Execution("made up", one.request, [one.ranks[0], replace(other.ranks[0], rank=1)])


@pytest.mark.parametrize(("hits", "alarms"), [(48, 0), (40, 5), (30, 20)])
def test_the_bound_is_below_what_is_likely_and_each_side_has_half_of_the_chance(hits: int, alarms: int) -> None:
    found = apart(hits, 48, alarms, 48, ALARM)
    normal = torch.distributions.Normal(0.0, 1.0)
    likely = [float(normal.icdf(torch.tensor((count + 0.5) / 49))) for count in (hits, alarms)]
    assert found <= likely[0] - likely[1]
    if hits == 48:
        least = (ALARM / 2) ** (1 / 48)
        assert math.isclose(binomial.above(48, 48, least), ALARM / 2, rel_tol=1e-6)
        assert math.isclose(found, 2 * float(normal.icdf(torch.tensor(least, dtype=torch.float64))), rel_tol=1e-6)


def test_cases_have_the_canary_last_and_their_neighbours_have_none() -> None:
    for case in trials(Reference.features, (1, 2, 3, 4, 5)):
        assert case.world_size in (1, 3)
        last = case.layout.batch_size - 1
        assert last in case.layout.lists[-1]
        assert all(last not in own for own in without_canary(case).layout.lists)
        assert [index for index, _ in canaries(case)] == [last, 2 * last + 1]
