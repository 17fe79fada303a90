"""Climbing: cases are sought that come further and further, so that "holds" says how much was tried.

A law that allows as much as k * C holds of a training that moves by a tenth of it, and of one that would exceed it a
little where the bound is reached. And a law holds of what no case ran: where branches are measured, cases are sought
that run new ones. Hypothesis draws cases and changes those that came furthest (``hypothesis.target``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

import hypothesis
from hypothesis.errors import Unsatisfiable

from fsdpcheck.case import Case
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.exploration import Exploration, Rejected, SetAside, Stop, cases_of, seed_of
from fsdpcheck.judging.run import Ran
from fsdpcheck.strategies import enumeration

_MOST: Final = 60
"""Bits beyond which nothing is nearer: what is left is rounding."""


def nearness(ran: Ran) -> dict[str, float]:
    """How near the newest case came to each bound of its law."""
    return {kind: bits(share) for kind, share in ran.reached.items()}


def rarity(found: Exploration) -> Callable[[Ran], dict[str, float]]:
    """How rare the branches are that the newest case ran, among the cases that ``found`` has drawn; in bits, summed.

    A branch that none of n cases ran counts as one that half a case did, so a first is above all else.
    """
    count = found.branches.copy()
    cases = found.tally.passed

    def height(ran: Ran) -> dict[str, float]:
        return {"rare branches": sum(math.log2(max(cases, 1) / (count[one] or 0.5)) for one in ran.branches)}

    return height


def climb(
    found: Exploration, count: int, height: Callable[[Ran], Mapping[str, float]] = nearness
) -> BaseException | None:
    """Judge ``count`` more cases on the way up; what ended it early, or None, also where the law broke."""
    cases = cases_of(found.law, found.run, found.world_sizes)
    seed = seed_of(f"{found.law.space.drawn.key} climbing", found.seed)
    seen: dict[Case, Mapping[str, float]] = {}

    def take(case: Case) -> None:
        if case not in seen:
            try:
                found.judge(case)
            except (Rejected, SetAside):
                hypothesis.reject()
            seen[case] = height(found.run.ran)
        for kind, reached in seen[case].items():
            hypothesis.target(reached, label=kind)

    try:
        enumeration.each(cases, count, seed, take, shrink=found.shrink, climb=True)
    except (Violation, Unsatisfiable):
        return None
    except (Exception, Stop) as stop:
        return stop
    return None


def bits(share: Fraction) -> float:
    """k of a ``share`` of the bound that is 1 - 2^-k; at most ``_MOST``, which a share of 1 or more has."""
    gap = 1 - share
    return _MOST if gap <= Fraction(1, 1 << _MOST) else -math.log2(gap)


def told(kind: str, share: Fraction) -> str:
    """What cases of this kind came to, in words; k is rounded down."""
    whole = int(bits(share))
    return f"{kind}: " + ("the bound is reached" if whole == _MOST else f"the bound is reached to 2^-{whole}")
