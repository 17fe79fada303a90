"""Per-sample norms on real numbers, held against the gradients of a replay in the same shapes (see
checks/shape_matched_replay.py).

A norm that is too small is the worse mistake: its sample is clipped too little, and moves the sum by more than C. One
that is too large costs utility only. The half-Gram form and few bits are what makes norms too small: where the terms of
a gradient cancel, the root of a rounded Gram sum can be anything down to zero.

Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from fsdpcheck.adapters.contract import NormRule
from fsdpcheck.checks._compare import number, require_row_form
from fsdpcheck.checks._read import completed, recorded
from fsdpcheck.checks.per_sample_replay import Seen, require_bounded, samples_of
from fsdpcheck.diagnosis import bits as narrow
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import bounds

_UNIT = 2.0**-53
"""The unit roundoff. Roots, and squares of norms, are off by a few."""


def assert_norms_near(execution: Execution, rule: NormRule | None = None) -> None:
    """Every reported norm is that of the sample's own gradient: not below it by more than is proved, nor above it.

    Where ``rule`` adds an eps, that of the sample's gradient and eps.

    For float64 cases whose operators all have a rule of their paths; raises NotExact for others.
    """
    case = execution.request.training
    seen: Seen = {}
    require_bounded(case)
    completed(execution)
    for k in range(case.step.steps):
        for result, (rank, got) in zip(execution.ranks, recorded(execution, k, "norms"), strict=True):
            found, where = list(samples_of(execution, result, k, seen)), f"step {k}, rank {rank}"
            require_row_form(
                "per-sample gradient norms are wrong", got, torch.zeros(len(found), dtype=got.dtype), where
            )
            for place, (norm, own) in enumerate(zip(got.tolist(), found, strict=True)):
                least, most = _range(own.least, own.most, rule or NormRule())
                _require_between(norm, least, most, f"{where}, sample {own.sample} (local {place})")


def _range(least: Fraction, most: Fraction, rule: NormRule) -> tuple[Fraction, Fraction]:
    """(least, most) that the square of a norm with ``rule``'s eps can be, which is added with one rounding more."""
    if not rule.eps:
        return least, most
    room = bounds.gamma(4, bounds.UNIT_ROUNDOFF["float64"])
    return bounds.norm_of(least, rule) ** 2 * (1 - room), bounds.norm_of(most, rule) ** 2 * (1 + room)


def _require_between(norm: float, least: Fraction, most: Fraction, where: str) -> None:
    finite = math.isfinite(norm)
    squared = Fraction(norm) ** 2 if finite else Fraction(0)
    if finite and norm >= 0 and least <= squared <= most:
        return
    low, high = (float(bounds.square_root(each)) for each in (least, most))
    below = finite and squared < least
    raise Violation(
        f"a per-sample norm is {'below' if below else 'not'} the norm of the sample's gradient",
        got=number(norm),
        wanted=f"a number from {low!r} to {high!r}",
        where=f"{where}{'; it is clipped too little' if below else ''}",
        cause=_of_few_bits(norm, low if below else high) if finite else "",
    )


def _of_few_bits(norm: float, wanted: float) -> str:
    """Whether a norm, or its square, is the nearest one in a narrower type: the size of an error alone says nothing."""
    for noun, value, right in (("squared norms are", norm**2, wanted**2), ("norms are", norm, wanted)):
        for count in narrow.TYPES:
            own, near = (float(narrow.rounded(torch.tensor(v, dtype=torch.float64), count)) for v in (value, right))
            if own == near and abs(value - own) <= 8 * _UNIT * own:
                return f"{noun} {narrow.words(count)}"
    return ""
