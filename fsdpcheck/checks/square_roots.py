"""Norms and clip factors by either of the two square roots that an implementation may take.

``torch.sqrt`` is not everywhere the correctly rounded root: through MKL on a CPU with AVX-512 about six roots in a
thousand are one unit in the last place beside it, while those of C, of NumPy and of ``torch.linalg.vector_norm`` are
it; on other CPUs all are. Roots of squares are exact in both. An implementation may take either, so whoever compares
every bit asks here; whoever bounds errors allows for 2u (``bounds.ROOT``).

Source: tt-mlir#8533; pytorch#188792, where a first call that is made by several threads at once is far worse.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.checks._read import pick
from fsdpcheck.oracle import Answer, StepAnswer


def rounded(squared: Tensor) -> Tensor:
    """The correctly rounded square roots, of the same shape and dtype; on a CPU."""
    return torch.from_numpy(numpy.sqrt(squared.numpy()))


def norms(answer: Answer, step: StepAnswer, rows: list[int], got: Tensor) -> Tensor:
    """[b]: the right norms of the samples ``rows``; of each the one that ``got`` has, if that is one of the two."""
    return _nearest(got, pick(step.norms, rows), pick(_norms(answer, step), rows))


def factors(answer: Answer, step: StepAnswer, rows: list[int], got: Tensor) -> Tensor:
    """[b], or [b, G] with clipping groups: the same of clip factors."""
    return _nearest(got, pick(step.factors, rows), pick(other_factors(answer, step), rows))


def in_order(answer: Answer, step: StepAnswer, times: Tensor, got: Tensor | None) -> Tensor:
    """The norms of all samples of a step, each as often as ``times`` [n] says; the same."""
    right = step.norms.repeat_interleave(times)
    return right if got is None else _nearest(got, right, _norms(answer, step).repeat_interleave(times))


def other_factors(answer: Answer, step: StepAnswer) -> Tensor:
    """The factors, [n] or [n, G], of correctly rounded norms."""
    if answer.case.step.clipping in ("none", "unclipped"):
        return step.factors
    norms_nG = oracle.norms(step.group_squares.to(step.norms.dtype), answer.rule.norm, rounded)
    by_group = zip(norms_nG.unbind(1), answer.clip_norms, strict=True)
    found = torch.stack([oracle.factors(norm, bound, answer.rule) for norm, bound in by_group], 1)
    return found if step.factors.dim() == 2 else found[:, 0]


def _norms(answer: Answer, step: StepAnswer) -> Tensor:
    return oracle.norms(step.squared_norms.to(step.norms.dtype), answer.rule.norm, rounded)


def _nearest(got: Tensor, of_torch: Tensor, other: Tensor) -> Tensor:
    if got.shape != of_torch.shape or got.dtype != of_torch.dtype:
        return of_torch
    return torch.where(got == other, other, of_torch)
