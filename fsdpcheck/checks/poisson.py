"""Checks of the joint law of Poisson draws, by exact binomial tests at a stated error rate.

Under the law all D * S indicators "record i joins step s" are independent with probability q, whichever rank draws
them. So each count below is binomial, and so is each under every way of splitting the records over ranks. Which of the
tests breaks names the mistake: the probability, the size of a batch, two records or ranks of one stream, two steps.

Legend: D records, S steps of all epochs, q the probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdpcheck import binomial
from fsdpcheck.checks.samplers import logical, spec_of
from fsdpcheck.errors import Violation
from fsdpcheck.execution import Execution

FALSE_ALARM = 1e-9
"""Most probability that a case of right draws is called wrong, shared out to its tests (Bonferroni)."""

Joined = NDArray[np.bool_]
"""[S, D]: whether a record joins a step."""


@dataclass(frozen=True)
class Count:
    """``k`` of ``n`` events that are independent and have probability ``q`` each. ``cause``: what else explains it."""

    what: str
    k: int
    n: int
    q: float
    cause: str


def assert_poisson(execution: Execution) -> None:
    """No count is as far out as it would be with probability FALSE_ALARM in all."""
    joined, q = _joined(execution), spec_of(execution).rate
    _require([*_rates(joined, q), *_sizes(joined, q), *_records(joined, q), *_steps(joined, q)])


def assert_rate(execution: Execution) -> None:
    """The number of records drawn in all is as Binomial(D * S, q) has it; of n = D * S, see ``limits``."""
    joined = _joined(execution)
    _require([next(_rates(joined, spec_of(execution).rate))])


def _joined(execution: Execution) -> Joined:
    spec, drawn = spec_of(execution), logical(execution)
    joined = np.zeros((len(drawn), spec.records), dtype=np.bool_)
    for row, lists in zip(joined, drawn.values(), strict=True):
        for own in lists:
            row[list(own)] = True
    return joined


def _require(counts: list[Count]) -> None:
    """Raises Violation for the count that is least likely, if it is less likely than its part of FALSE_ALARM."""
    chances = [binomial.as_far_out(count.k, count.n, count.q) for count in counts]
    chance = min(chances, default=1.0)
    if chance <= FALSE_ALARM / max(1, len(counts)):
        count = counts[chances.index(chance)]
        raise Violation(
            "records are not drawn as Poisson sampling draws them",
            got=f"{count.k} of {count.n}",
            wanted=f"about {count.n * count.q:.1f}: so far out with probability {chance:.1e} at most",
            where=count.what,
            cause=count.cause,
        )


def _rates(joined: Joined, q: float) -> Iterator[Count]:
    """How often records join: all together, then each."""
    total = int(joined.sum())
    cause = f"the probability is not {q}: {total / max(1, joined.size):.4f} of all draws join"
    yield Count("all draws of all records", total, joined.size, q, cause)
    for record, joins in enumerate(joined.sum(0).tolist()):
        yield Count(f"steps that record {record} joins", joins, len(joined), q, "not all records have one probability")


def _sizes(joined: Joined, q: float) -> Iterator[Count]:
    """How many steps have a batch of at least t records, for every t."""
    steps, records = joined.shape
    sizes, cause = joined.sum(1), "the size of a batch is fixed, bounded, or drawn by another law"
    for t in range(1, records + 1):
        chance = binomial.above(t, records, q)
        if 0 < chance < 1:
            yield Count(f"steps of {t} records or more", int((sizes >= t).sum()), steps, chance, cause)


def _records(joined: Joined, q: float) -> Iterator[Count]:
    """In how many steps two records agree, for every pair of them: also records of two ranks."""
    signs = np.where(joined, 1, -1).astype(np.int64)
    agreeing = (signs.T @ signs + len(joined)) // 2
    for one in range(agreeing.shape[0]):
        for other in range(one):
            what = f"steps in which records {other} and {one} both join or both do not"
            cause = "two records join together or apart: two ranks draw the same stream, or one draw is not independent"
            yield Count(what, int(agreeing[one, other]), len(joined), _agree(q), cause)


def _steps(joined: Joined, q: float) -> Iterator[Count]:
    """How many records two steps agree on, over disjoint pairs of steps that are ``lag`` apart, for every lag."""
    steps = len(joined)
    for lag in range(1, steps):
        first = [step for step in range(steps - lag) if step // lag % 2 == 0]
        agreeing = int((joined[first] == joined[[step + lag for step in first]]).sum())
        what = f"draws that are the same {lag} steps later"
        yield Count(what, agreeing, len(first) * joined.shape[1], _agree(q), "draws of a step are used again")


def _agree(q: float) -> float:
    return q * q + (1 - q) * (1 - q)
