"""The contribution of chosen samples to the right released gradient. Legend: n samples of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis.cause_fit import rows
from fsdpcheck.oracle import Answer, Named, StepAnswer


def of_each(case: TrainingCase, wanted: StepAnswer) -> Tensor:
    """Weight [n] of each sample for each time it occurs."""
    return wanted.factors.double() / case.step.normaliser


def pick(once: Tensor, chosen: Iterable[int]) -> Tensor:
    """Weights [n] that the rows ``chosen`` add up to, each as often as it is named; ``once`` [n] a row named once."""
    weights = torch.zeros_like(once)
    for row in chosen:
        weights[row] += once[row]
    return weights


def weighted(gradients: Named, weights: Tensor) -> Named:
    """The sum of per-sample ``gradients`` by ``weights`` [n]."""
    return {name: torch.tensordot(weights, value, dims=1) for name, value in gradients.items()}


def of_rows(answer: Answer, step: int, chosen: Iterable[int]) -> Tensor:
    """Weights [n] that these rows add to the released gradient, each as often as it is named."""
    return pick(of_each(answer.case, answer.steps[step]), chosen)


def of_rank(answer: Answer, step: int, rank: int) -> Tensor:
    """Weights [n] of the samples of one rank alone."""
    return of_rows(answer, step, rows(answer.case, step, answer.steps[step])[rank])
