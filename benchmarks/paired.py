"""Two arms in one process, interleaved ABBA; the median of the pairwise ratios with a bootstrap interval."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

PAIRS = 15


@dataclass(frozen=True)
class Ratio:
    """``ratio`` is the median of peer time / our time over the pairs: above 1 we are faster."""

    name: str
    ours_seconds: float
    peer_seconds: float
    ratio: float
    low: float
    high: float
    goal: str

    def __str__(self) -> str:
        return (
            f"{self.name:<58} ours {self.ours_seconds * 1e3:9.3f} ms   peer {self.peer_seconds * 1e3:9.3f} ms   "
            f"peer/ours {self.ratio:8.2f}  [{self.low:.2f}, {self.high:.2f}]   goal {self.goal}"
        )


def paired(
    name: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    goal: str,
    pairs: int = PAIRS,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time both arms ``pairs`` times, in alternating order, after one warm-up of each. 95 % bootstrap interval."""
    ours(), peer()
    mine, theirs = [], []
    for pair in range(pairs):
        arms = [(ours, mine), (peer, theirs)]
        for arm, times in arms if pair % 2 == 0 else reversed(arms):
            gc.collect()
            started = clock()
            arm()
            times.append(clock() - started)
    ratios = np.array(theirs) / np.array(mine)
    interval = stats.bootstrap((ratios,), np.median, n_resamples=2000, rng=0, method="percentile").confidence_interval
    return Ratio(
        name,
        statistics.median(mine),
        statistics.median(theirs),
        float(np.median(ratios)),
        float(interval.low),
        float(interval.high),
        goal,
    )
