"""Check of runs of one case that train other parameters: squared norms add up over the parameters.

Freezing some parameters takes their terms from a sample's squared norm, whatever else is trained. No oracle is needed,
so a mistake that an implementation and the oracle share is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from fsdpcheck.case import Case
from fsdpcheck.checks.bounds import UNIT_ROUNDOFF, gamma
from fsdpcheck.checks.comparing import form, number, require_row_form
from fsdpcheck.checks.recorded import completed, local_samples, recorded
from fsdpcheck.errors import Diagnose, Violation
from fsdpcheck.execution import Execution
from fsdpcheck.suspects import Suspect, Suspects

Range = tuple[Fraction, Fraction]


class Norms(NamedTuple):
    """One sample's reported norm: of the case, with the first parameters frozen, with the second, and with both."""

    whole: float
    first: float
    second: float
    both: float


def assert_additive(runs: Sequence[Execution], bound: Fraction) -> None:
    """At the first step squared norms of ``runs`` are whole + both = first + second, for every sample of every rank.

    ``runs``: the case, the first parameters frozen, the second frozen and, where anything is trained then, both. The
    numbers are exact but for the root, so each reported norm is off by its rounding, or by the relative ``bound`` of a
    norm of norms: what is left for the squares is decided in fractions.
    """
    for run in runs:
        completed(run)
    case = runs[0].request.case
    in_layers = all(_whole_layers(case, run.request.case) for run in runs[1:])
    off = max(bound, UNIT_ROUNDOFF[case.arithmetic.dtype])
    for found in zip(*(recorded(run, 0, "norms") for run in runs), strict=True):
        (rank, whole), *others = found
        samples, where = local_samples(case, 0, rank), f"step 0, rank {rank}"
        if len(whole) != len(samples):
            what = "not every sample has a norm"
            raise Violation(what, got=form(whole), wanted=f"{len(samples)} norms", where=where)
        for _, other in others:
            require_row_form("a model with frozen parameters has other norms", other, whole, where)
        for place, sample in enumerate(samples):
            own = [float(norms[place]) for _, norms in found]
            four = Norms(*own, *[0.0] * (4 - len(own)))
            cause = partial(_suspects, four, off, in_layers)
            _require_sum(four, off, f"{where}, sample {sample} (local {place})", cause)


def _whole_layers(case: Case, other: Case) -> bool:
    """Whether ``other`` freezes layers of ``case`` as wholes."""
    layers = zip(case.model.layers, other.model.layers, strict=True)
    return all(new.frozen == ("all" if new.bias else "weight") for old, new in layers if old.frozen != new.frozen)


def _require_sum(norms: Norms, off: Fraction, where: str, cause: Diagnose) -> None:
    if all(math.isfinite(norm) and norm >= 0 for norm in norms):
        whole, first, second, both = (_square(norm, off) for norm in norms)
        if _meet(_sum(whole, both), _sum(first, second)):
            return
    raise Violation(
        "squared norms do not add up over the parameters",
        got=f"{_squared(norms.whole)} + {_squared(norms.both)} with all trained, and with both parts frozen",
        wanted=f"{_squared(norms.first)} + {_squared(norms.second)}, as with one part frozen, and with the other",
        where=where,
        cause=cause,
    )


def _squared(norm: float) -> str:
    return f"{number(norm)}^2"


def _square(norm: float, off: Fraction) -> Range:
    """What the square may be of which ``norm`` is the root, but for a relative ``off``."""
    return (Fraction(norm) / (1 + off)) ** 2, (Fraction(norm) / (1 - off)) ** 2


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _meet(a: Range, b: Range) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def _suspects(norms: Norms, off: Fraction, in_layers: bool) -> Suspects | None:
    """Norms that add up themselves, or one that does not hang on what is frozen.

    What is added may be of layers, which nobody can tell where parts of one are frozen.
    """
    if not all(map(math.isfinite, norms)):
        return []
    few = gamma(8, off)  # forming a sum of norms rounds some more
    whole, first, second, both = ((Fraction(norm) / (1 + few), Fraction(norm) / (1 - few)) for norm in norms)
    if _meet(_sum(whole, both), _sum(first, second)):
        return [Suspect("norms added", "the norms of parameters are added, where their squares should be")]
    if norms.whole in (norms.first, norms.second) and norms.first != norms.second:
        return [Suspect("frozen counts", "frozen parameters count: freezing a part of them leaves the norm as it is")]
    return [] if in_layers else None
