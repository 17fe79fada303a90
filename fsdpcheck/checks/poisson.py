"""Checks of the joint law of Poisson draws, by exact binomial tests at a stated error rate.

Under the law all D * S indicators "record i joins step s" are independent with probability q, whichever rank draws
them. So each count below is binomial, and so is each under every way of splitting the records over ranks. Which of the
tests breaks names the mistake: the probability, the size of a batch, two records or ranks of one stream, two steps.

Legend: D records, S steps of all epochs, q the probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdpcheck.checks.samplers import logical, spec_of
from fsdpcheck.exact import binomial
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import PATTERN, Cause
from fsdpcheck.findings.violation import Diagnose, Violation

FALSE_ALARM = 1e-9
"""Most probability that a case of right draws is called wrong, shared out to its tests (Bonferroni)."""

_SEVERAL = 64
"""Steps of which all agree by chance too seldom to be thought of."""
_COMPARED = 64
"""Most records that are compared pair by pair."""
_SHOWN = 3
Joined = NDArray[np.bool_]
"""[S, D]: whether a record joins a step."""


@dataclass(frozen=True)
class Count:
    """``k`` of ``n`` events that are independent and have probability ``q`` each."""

    what: str
    k: int
    n: int
    q: float


def assert_poisson(execution: Execution) -> None:
    """No count is as far out as it would be with probability FALSE_ALARM in all."""
    joined, q = _joined(execution), spec_of(execution).rate
    counts = [*_rates(joined, q), *_sizes(joined, q), *_records(joined, q), *_steps(joined, q)]
    _require(counts, lambda: _causes(joined, q, _owners(execution)))


def assert_rate(execution: Execution) -> None:
    """The number of records drawn in all is as Binomial(D * S, q) has it; of n = D * S, see ``limits``."""
    joined, q = _joined(execution), spec_of(execution).rate
    _require([next(_rates(joined, q))], lambda: list(_of_rate(joined, q)))


def _joined(execution: Execution) -> Joined:
    spec, drawn = spec_of(execution), logical(execution)
    joined = np.zeros((len(drawn), spec.records), dtype=np.bool_)
    for row, lists in zip(joined, drawn.values(), strict=True):
        for own in lists:
            row[list(own)] = True
    return joined


def _require(counts: list[Count], cause: Diagnose) -> None:
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
            cause=cause,
        )


def _rates(joined: Joined, q: float) -> Iterator[Count]:
    """How often records join: all together, then each."""
    total = int(joined.sum())
    yield Count("all draws of all records", total, joined.size, q)
    for record, joins in enumerate(joined.sum(0).tolist()):
        yield Count(f"steps that record {record} joins", joins, len(joined), q)


def _sizes(joined: Joined, q: float) -> Iterator[Count]:
    """How many steps have a batch of at least t records, for every t."""
    steps, records = joined.shape
    sizes = joined.sum(1)
    for t in range(1, records + 1):
        chance = binomial.above(t, records, q)
        if 0 < chance < 1:
            yield Count(f"steps of {t} records or more", int((sizes >= t).sum()), steps, chance)


def _records(joined: Joined, q: float) -> Iterator[Count]:
    """In how many steps two records agree, for every pair of them: also records of two ranks."""
    signs = np.where(joined, 1, -1).astype(np.int64)
    agreeing = (signs.T @ signs + len(joined)) // 2
    for one in range(agreeing.shape[0]):
        for other in range(one):
            what = f"steps in which records {other} and {one} both join or both do not"
            yield Count(what, int(agreeing[one, other]), len(joined), _agree(q))


def _steps(joined: Joined, q: float) -> Iterator[Count]:
    """How many records two steps agree on, over disjoint pairs of steps that are ``lag`` apart, for every lag."""
    steps = len(joined)
    for lag in range(1, steps):
        first = [step for step in range(steps - lag) if step // lag % 2 == 0]
        agreeing = int((joined[first] == joined[[step + lag for step in first]]).sum())
        what = f"draws that are the same {lag} steps later"
        yield Count(what, agreeing, len(first) * joined.shape[1], _agree(q))


def _agree(q: float) -> float:
    return q * q + (1 - q) * (1 - q)


def _causes(joined: Joined, q: float, owners: list[int | None]) -> list[Cause]:
    """What else gives ``joined``. ``owners``: the share of each record, None where it is never drawn."""
    found, sizes = list(_of_rate(joined, q)), joined.sum(1)
    if len(joined) >= _SEVERAL and len(set(sizes.tolist())) == 1:
        found.append(Cause("fixed size", f"the size of a batch is fixed: every one has {int(sizes[0])} records"))
    elif len(joined) >= _SEVERAL and _cut_off(sizes, joined.shape[1], q):
        found.append(Cause("largest size", f"the size of a batch is cut off at {int(sizes.max())} records"))
    found += _of_streams(joined, owners)
    for lag in range(1, len(joined) - _SEVERAL):
        if bool((joined[lag:] == joined[:-lag]).all()):
            text = "draws of a step are used again"
            found.append(Cause("again", f"{text}: those of the first {lag} steps, over and over"))
            break
    return found


def _of_rate(joined: Joined, q: float) -> Iterator[Cause]:
    """Whether records join with another probability; of one that never does while others do, that is another's law."""
    total = int(joined.sum())
    if binomial.as_far_out(total, joined.size, q) <= FALSE_ALARM:
        text = f"the probability is not {q}: {total / max(1, joined.size):.4f} of all draws join"
        yield Cause("rate", text)
    shares = joined.sum(0)
    never = [record for record, count in enumerate(shares.tolist()) if not count]
    if 0 < len(never) < len(shares) and (1 - q) ** len(joined) < FALSE_ALARM / len(shares):
        yield Cause("never", f"records {', '.join(map(str, never[:_SHOWN]))} are never drawn, others are", PATTERN)


def _cut_off(sizes: NDArray[np.int64], records: int, q: float) -> bool:
    """Whether the largest size stands more often than chance gives it, and no larger one where some should."""
    largest = int(sizes.max())
    often = binomial.as_far_out(int((sizes == largest).sum()), len(sizes), binomial.above(largest, records, q))
    beyond = binomial.above(largest + 1, records, q) if largest < records else 0.0
    return beyond > 0 and (1 - beyond) ** len(sizes) < FALSE_ALARM and often > FALSE_ALARM


def _of_streams(joined: Joined, owners: list[int | None]) -> Iterator[Cause]:
    """Whether records of two shares always join together."""
    if len(joined) < _SEVERAL or joined.shape[1] > _COMPARED:
        return
    for one, other in itertools.combinations(range(joined.shape[1]), 2):
        apart = None not in (owners[one], owners[other]) and owners[one] != owners[other]
        if apart and bool((joined[:, one] == joined[:, other]).all()) and 0 < joined[:, one].sum() < len(joined):
            text = f"records {one} and {other} of two shares always join together: ranks draw the same stream"
            yield Cause("one stream", text)
            return


def _owners(execution: Execution) -> list[int | None]:
    found = {
        record: share for drawn in logical(execution).values() for share, own in enumerate(drawn) for record in own
    }
    return [found.get(record) for record in range(spec_of(execution).records)]
