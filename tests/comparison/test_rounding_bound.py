"""The bound on what rounding explains: its formula against draws of sums of uniform variables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fsdpcheck.comparison.rounding_bound import factor


@pytest.mark.parametrize("terms", [1, 2, 3, 20])
@pytest.mark.parametrize("runs", [1, 2, 4, 8])
@pytest.mark.parametrize("entries", [1, 7])
def test_honest_runs_are_accused_no_more_often_than_is_said(terms: int, runs: int, entries: int) -> None:
    """A false alarm of 20 % is drawn 4,000 times, so that the share says something; Hoeffding bounds its own error."""
    draws, alarm = 4000, 0.2
    uniform = np.random.default_rng(terms * 100 + runs * 10 + entries).uniform
    sums = uniform(-1, 1, (draws, 2 + 2 * runs, entries, terms)).sum(-1)
    apart = np.abs(sums[:, 0] - sums[:, 1]).max(-1)
    noise = np.abs(sums[:, 2:]).max((1, 2))
    accused = (apart > factor(runs, entries, 1, alarm) * noise).mean()
    assert accused <= alarm + math.sqrt(math.log(1e9) / (2 * draws))


def test_one_world_may_be_far_noisier_than_the_other() -> None:
    draws, alarm, runs = 4000, 0.2, 4
    uniform = np.random.default_rng(0).uniform
    quiet, loud = uniform(-1, 1, (draws, 1 + runs)), uniform(-100, 100, (draws, 1 + runs))
    apart = np.abs(quiet[:, 0] - loud[:, 0])
    noise = np.maximum(np.abs(quiet[:, 1:]).max(1), np.abs(loud[:, 1:]).max(1))
    assert (apart > factor(runs, 1, 1, alarm) * noise).mean() <= alarm + math.sqrt(math.log(1e9) / (2 * draws))


def test_more_runs_see_finer_and_more_observables_less_fine() -> None:
    by_runs = [factor(runs, 100, 1000, 1e-6) for runs in (2, 4, 8, 16)]
    assert by_runs == sorted(by_runs, reverse=True)
    assert factor(4, 100, 1, 1e-6) < factor(4, 100, 1000, 1e-6) < factor(4, 10**6, 1000, 1e-6)


def test_the_share_of_each_tail_is_what_the_theorem_says() -> None:
    """Of one entry and one run: t and r solve the two halves exactly."""
    alarm = 1e-3
    t, r = math.sqrt(2 * math.log(4 / alarm)), alarm / 2 / math.sqrt(2)
    assert factor(1, 1, 1, alarm) == pytest.approx(math.sqrt(2) * t / r, rel=1e-12)
