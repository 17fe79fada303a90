"""Causes of wrong clipping by group: a parameter's factor comes from another group's bound or norm.

Legend: n samples of a step, G clipping groups, C_l the clip norm of group l.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload import clip_groups


def gradients(answer: Answer, step: int) -> Iterator[tuple[Cause, Named]]:
    """(cause, released gradient, float64), of a case that clips by group."""
    wanted = answer.steps[step]
    counts_n1 = torch.tensor(wanted.multiplicity, dtype=torch.float64).unsqueeze(1) / answer.case.step.normaliser
    for cause, factors_nG in _candidates(answer, step):
        weights_nG = factors_nG.double() * counts_n1
        yield (
            cause,
            {
                name: torch.tensordot(weights_nG[:, clip_groups.number(answer.case, name)], value, dims=1)
                for name, value in wanted.gradients.items()
            },
        )


def _candidates(answer: Answer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, factors [n, G])."""
    wanted, bounds = answer.steps[step], answer.clip_norms
    right, count = wanted.factors, len(bounds)
    if not wanted.samples or answer.case.step.clipping in ("none", "unclipped"):
        return
    norms_nG = wanted.group_squares.to(right.dtype).sqrt()
    whole = math.hypot(*bounds)
    text = f"every clipping group is given the bound of all of them, sqrt(sum C_l^2) = {whole:.6g}, in place of its own"
    yield Cause("groups: whole bound", text), _factors(answer, norms_nG, [whole] * count)
    text = "every clipping group is clipped by the norm over all of them, not by its own"
    yield Cause("groups: whole norm", text), _factors(answer, wanted.norms.unsqueeze(1).expand(-1, count), bounds)
    text = "the bounds of the clipping groups are in reverse order"
    yield Cause("groups: bounds reversed", text), _factors(answer, norms_nG, bounds[::-1])
    text = "the smallest of a sample's factors weighs all of its clipping groups"
    yield Cause("groups: smallest factor", text), right.amin(1, keepdim=True).expand(-1, count)
    for shift, word in ((1, "before"), (-1, "behind")):
        text = f"the factors of a clipping group are those of the one {word} it"
        yield Cause(f"groups: factors shifted {shift}", text), right.roll(shift, 1)


def _factors(answer: Answer, norms_nG: Tensor, bounds: Sequence[float]) -> Tensor:
    """[n, G]: the right expression, of these norms and bounds."""
    own = zip(norms_nG.unbind(1), bounds, strict=True)
    return torch.stack([oracle.factors(norms_n, bound, answer.rule) for norms_n, bound in own], 1)
