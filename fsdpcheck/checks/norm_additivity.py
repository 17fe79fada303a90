"""Additivity of squared norms over parameters: checks of runs of one case that train other parameters.

Freezing some parameters takes their terms from a sample's squared norm, whatever else is trained. No oracle is needed,
so a mistake that an implementation and the oracle share is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import number, require_row_form
from fsdpcheck.checks._read import completed, local_samples, recorded
from fsdpcheck.checks.shape_matched_replay import trained_names
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.oracle.bounds import ROOT, UNIT_ROUNDOFF, gamma
from fsdpcheck.workload import models

Range = tuple[Fraction, Fraction]


class Norms(NamedTuple):
    """One sample's reported norm: of the case, with the first part frozen, with the second, and with both, else 0."""

    whole: float
    first: float
    second: float
    both: float


def assert_additive(runs: Sequence[Execution], bound: Fraction) -> None:
    """At the first step squared norms of ``runs`` are whole + both = first + second, for every sample of every rank.

    ``runs``: the case, with one part of its parameters frozen, with another and, if anything is trained then, with
    both. The numbers are exact but for the root, so each reported norm is off by that, or by the relative ``bound`` of
    a norm of norms: what is left for the squares is decided in fractions.
    """
    for run in runs:
        completed(run)
    cases = [run.request.training for run in runs]
    one, other = (", ".join(_frozen(cases[0], case)) for case in cases[1:3])
    dtype, off = cases[0].arithmetic.dtype, max(bound, ROOT * UNIT_ROUNDOFF[cases[0].arithmetic.dtype])
    in_layers = all(_whole_layers(cases[0], case) for case in cases[1:])
    for found in zip(*(recorded(run, 0, "norms") for run in runs), strict=True):
        rank = found[0][0]
        samples, where = local_samples(cases[0], 0, rank), f"step 0, rank {rank}"
        for (_, norms), case in zip(found, cases, strict=True):
            what = f"not every sample has a norm, with {', '.join(_frozen(cases[0], case)) or 'nothing'} frozen"
            require_row_form(what, norms, torch.zeros(len(samples), dtype=models.DTYPES[dtype]), where)
        for place, sample in enumerate(samples):
            own = [float(norms[place]) for _, norms in found]
            four = Norms(*own, *[0.0] * (4 - len(own)))
            cause = partial(_causes, four, off, in_layers)
            _require_sum(four, off, f"{where}, sample {sample} (local {place}); frozen {one}; or {other}", cause)


def _frozen(case: TrainingCase, other: TrainingCase) -> list[str]:
    """What ``other`` freezes of what ``case`` trains."""
    trained = trained_names(other)
    return [name for name in trained_names(case) if name not in trained]


def _whole_layers(case: TrainingCase, other: TrainingCase) -> bool:
    """Whether ``other`` freezes layers of ``case`` as wholes."""
    layers = zip(case.model.layers, other.model.layers, strict=True)
    return all(new.frozen == ("all" if new.bias else "weight") for old, new in layers if old.frozen != new.frozen)


def _require_sum(norms: Norms, off: Fraction, where: str, cause: Diagnose) -> None:
    if all(norm >= 0 for norm in norms):
        whole, first, second, both = (_square(norm, off) for norm in norms)
        if _meet(_sum(whole, both), _sum(first, second)):
            return
    rest = f", and {_squared(norms.both)} with both parts frozen" if norms.both else ""
    raise Violation(
        "squared norms do not add up over the parameters",
        got=f"{_squared(norms.whole)} with all trained{rest}",
        wanted=f"as much as {_squared(norms.first)} + {_squared(norms.second)}, with one part frozen, and with another",
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


def _causes(norms: Norms, off: Fraction, in_layers: bool) -> Causes | None:
    """Norms that add up themselves, or one that does not depend on what is frozen.

    What is added may be of layers, which nobody can tell where parts of one are frozen.
    """
    few = gamma(8, off)  # forming a sum of norms rounds some more
    whole, first, second, both = ((Fraction(norm) / (1 + few), Fraction(norm) / (1 - few)) for norm in norms)
    if _meet(_sum(whole, both), _sum(first, second)):
        return [Cause("norms added", "the norms of parameters are added, where their squares should be")]
    if norms.whole in (norms.first, norms.second):
        return [Cause("frozen counts", "frozen parameters count: freezing a part of them leaves the norm as it is")]
    return [] if in_layers else None
