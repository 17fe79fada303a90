"""How far two honest runs can lie apart by rounding, from runs with noise: a bound with its probability.

Monte Carlo arithmetic multiplies what each operation is given and gives by 1 + u, u uniform and independent. To first
order an observable is then x + sum c_k u_k. Of such a sum, with standard deviation s:

- P(|sum| > t s) <= 2 exp(-t^2 / 2): a uniform variable is strictly sub-Gaussian, its variance proxy is its variance
  (Arbel, Marchal and Nguyen, "On strict sub-Gaussianity, optimal proxy variance and symmetry", 2020), and so is a sum.
- P(|sum| < r s) <= sqrt(2) r: a sum of independent uniform variables has a symmetric log-concave density, which is
  nowhere above 1 / (sqrt(2) s) (Bobkov and Chistyakov, "On concentration functions of random variables", 2015).

Let s be the largest deviation of an entry in either of two honest runs, and n the noisy runs of each. The runs differ
by sums of variance 2 s^2 at most. The largest distance of the noisy runs is less than r s with probability
(sqrt(2) r)^n at most, for one entry has the deviation s. So of an observable with m entries

    largest difference <= (sqrt(2) t / r) x largest distance of a noisy run

but for a probability of 2 m exp(-t^2 / 2) + (sqrt(2) r)^n.
"""

from __future__ import annotations

import math
from typing import Final

FALSE_ALARM: Final = 1e-6
"""Probability, by default, with which a comparison of an honest script reports a difference."""


def factor(runs: float, entries: int, observables: int, false_alarm: float) -> float:
    """How many times the largest distance of ``runs`` noisy runs an honest difference stays below.

    ``runs``: infinite, where the deviation itself is known. ``entries``: of the observable. ``false_alarm``:
    probability of one false alarm at most among ``observables``; half of each one's share goes to either tail.
    """
    return math.sqrt(2) * spread(runs, entries, observables, false_alarm)  # of two runs: sqrt(2) times the deviation


def spread(runs: float, entries: int, observables: int, false_alarm: float) -> float:
    """How many times the largest distance of ``runs`` noisy runs another stays below, alike but for chance."""
    each = false_alarm / max(observables, 1) / 2
    deviations = math.sqrt(2 * math.log(2 * max(entries, 1) / each))  # 2 m exp(-t^2 / 2) = each
    smallest = math.pow(each, 1 / runs) / math.sqrt(2)  # (sqrt(2) r)^n = each
    return deviations / smallest
