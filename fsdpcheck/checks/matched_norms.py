"""Per-sample norms on real numbers, held against the gradients of a replay in the same shapes (see matched.py).

A norm that is too small is the worse mistake: its sample is clipped too little, and moves the sum by more than C. One
that is too large costs utility only. The half-Gram form and few bits are what makes norms too small: where the terms of
a gradient cancel, the root of a rounded Gram sum can be anything down to zero.

Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import torch

from fsdpcheck import layouts
from fsdpcheck.checks import bounds
from fsdpcheck.checks.comparing import number, require_row_form
from fsdpcheck.checks.matched import local_losses, parameters_before
from fsdpcheck.checks.recorded import completed, recorded
from fsdpcheck.diagnosis import bits as narrow
from fsdpcheck.errors import NotExact, Violation
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.proof import traced_gradients

_ROOT = 2.0**-53
"""What a norm, and so its square, is rounded by when the root is taken."""


def assert_norms_near(execution: Execution) -> None:
    """Every reported norm is that of the sample's own gradient: not below it by more than is proved, nor above it.

    For float64 cases whose operators all have a rule in the proof; raises NotExact for others.
    """
    case = execution.request.case
    if case.model.own is not None or case.arithmetic.dtype != "float64":
        raise NotExact("norms on real numbers are bounded for float64 and our own layers only")
    completed(execution)
    for k in range(case.step.steps):
        for result, (rank, got) in zip(execution.ranks, recorded(execution, k, "norms"), strict=True):
            ranges = list(_ranges(execution, result, k))
            where = f"step {k}, rank {rank}"
            require_row_form(
                "per-sample gradient norms are wrong", got, torch.zeros(len(ranges), dtype=got.dtype), where
            )
            for place, (norm, (sample, least, most)) in enumerate(zip(got.tolist(), ranges, strict=True)):
                _require_between(norm, least, most, f"{where}, sample {sample} (local {place})")


def _ranges(execution: Execution, result: RankResult, k: int) -> Iterator[tuple[int, Fraction, Fraction]]:
    """(sample, least, most squared norm) of a rank's samples at one step, in the order of its micro-batches."""
    case = execution.request.case
    before = parameters_before(result, k, case)
    for micro in layouts.batch(case, k, result.rank, execution.request.instrument).micro_batches:
        if not micro.indices:
            continue
        losses, trained = local_losses(case, before, micro, result.placement)
        for place, sample in enumerate(micro.indices):
            alone = torch.zeros_like(losses)
            alone[place] = 1
            gradient, paths = traced_gradients(losses, trained, alone, keep=True)
            yield sample, *bounds.squared_norm_range(case, gradient, paths)


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
            if own == near and abs(value - own) <= 8 * _ROOT * own:
                return f"{noun} {narrow.words(count)}"
    return ""
