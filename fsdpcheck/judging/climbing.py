"""Climbing: cases are sought that come nearer and nearer a law's bound, so that "holds" says how much was tried.

A law that allows as much as k * C holds of a training that moves by a tenth of it, and of one that would exceed it a
little where the bound is reached. Hypothesis draws cases and changes those that came nearest (``hypothesis.target``).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import hypothesis
from hypothesis.errors import Unsatisfiable

from fsdpcheck.case import Case
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.exploration import Exploration, Rejected, SetAside, Stop, cases_of, seed_of
from fsdpcheck.strategies import enumeration

_MOST: Final = 60
"""Bits beyond which nothing is nearer: what is left is rounding."""


def climb(found: Exploration, count: int) -> BaseException | None:
    """Judge ``count`` more cases on the way to a bound; what ended it early, or None, also where the law broke."""
    cases = cases_of(found.law, found.run, found.world_sizes)
    seed = seed_of(f"{found.law.space.drawn.key} climbing", found.seed)
    seen: dict[Case, dict[str, Fraction]] = {}

    def take(case: Case) -> None:
        if case not in seen:
            try:
                found.judge(case)
            except (Rejected, SetAside):
                hypothesis.reject()
            seen[case] = dict(found.run.ran.reached)
        for kind, share in seen[case].items():
            hypothesis.target(float(bits(share)), label=kind)

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
