"""Joint clipping: samples that are clipped, or measured, as one sum, where each has to be taken alone.

Legend: n samples of a step, b in a group of them, C the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis.cause_fit import chunks, rows
from fsdpcheck.diagnosis.contributions import pick, weighted
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named, StepAnswer
from fsdpcheck.workload import models

_EPS = (0.0, 1e-6)  # what implementations add to the norm of a whole gradient
_PAIRS = Cause(
    "pairs share a norm", "two samples that follow each other share the mean of their squared norms: clipped as one"
)
_ONE_ROW = Cause(
    "one row for all",
    "a layer that runs on one row for all samples counts in the norm of each by the gradient of its whole micro-batch:"
    " refuse it, or have it given a row a sample",
)
_INSTEAD = "clip each sample's gradient, then add them up"


def clipped(answer: Answer, step: int) -> Iterator[tuple[Cause, Named]]:
    """Released gradients (float64) of samples that were added up, or averaged, before they were clipped."""
    case, wanted = answer.case, answer.steps[step]
    if not case.step.private or len(answer.clip_norms) > 1 or not wanted.samples:
        return
    normaliser = float(case.step.normaliser)
    scales = (
        ("summed", "summed", 1.0),
        ("mean", "mean", 1 / normaliser),
        ("scaled mean", "mean", case.shares / normaliser),
    )
    for same, groups in _groups(case, wanted, step):
        lengths = [float(_square(_sum(wanted.gradients, own))) ** 0.5 for own in groups]
        for key, word, scale in scales:
            for eps in sorted({*_EPS, answer.rule.eps}):
                weights = torch.zeros(len(wanted.samples), dtype=torch.float64)
                for own, length in zip(groups, lengths, strict=True):
                    factor = min(1.0, answer.clip_norm / (length * scale + eps)) if length * scale + eps else 1.0
                    weights += pick(torch.full_like(weights, factor / normaliser), own)
                text = f"the {word} gradient of {same[0]} is clipped, not each sample's: {_INSTEAD}"
                released = weighted(wanted.gradients, weights)
                yield from ((Cause(f"{key} gradient of {whose} clipped", text), released) for whose in same)


def norms(answer: Answer, step: int, rank: int) -> Iterator[tuple[Cause, Tensor]]:
    """Squared norms [n] of the gradient of a whole micro-batch, given to each of its samples."""
    wanted = answer.steps[step]
    if not wanted.samples:
        return
    squared = wanted.squared_norms.clone()
    for own in chunks(answer.case, step, wanted)[rank]:
        squared[own] = _square(_sum(wanted.gradients, own))
    text = "each sample is given the norm of the gradient of the whole micro-batch, not its own"
    yield Cause("norm of a micro-batch", text), squared


def one_row(answer: Answer, step: int, rank: int) -> Iterator[tuple[Cause, Tensor]]:
    """Squared norms [n] in which a layer on one row for all samples counts by the gradient of its micro-batch."""
    case, wanted = answer.case, answer.steps[step]
    shared = ((layer.name, layer.stage.spec) for layer in models.layer_names(case))
    names = tuple(f"{name}." for name, spec in shared if spec is not None and spec.used == "for all")
    own = {name: value for name, value in wanted.gradients.items() if name.startswith(names)}
    if not own:
        return
    squared = wanted.squared_norms - torch.stack([value.flatten(1).square().sum(1) for value in own.values()]).sum(0)
    for group in chunks(case, step, wanted)[rank]:
        squared[group] += _square(_sum(own, group))
    yield _ONE_ROW, squared


def pairs(answer: Answer, step: int, rank: int) -> Iterator[tuple[Cause, Tensor]]:
    """Squared norms [n] of samples of a rank that share their mean with the sample beside them."""
    wanted = answer.steps[step]
    found = wanted.squared_norms.clone()
    for own in chunks(answer.case, step, wanted)[rank]:
        found[own] = _paired(wanted.squared_norms[own])
    yield _PAIRS, found


def factors(answer: Answer, step: int) -> Iterator[tuple[Cause, Callable[[list[int]], Tensor]]]:
    """(cause, clip factors [b] of the rows of one micro-batch) that depend on which samples a micro-batch has."""
    wanted, rule = answer.steps[step], answer.rule

    def of_pairs(own: list[int]) -> Tensor:
        squares = _paired(wanted.squared_norms[own]).to(wanted.norms.dtype)
        return oracle.factors(squares.sqrt(), answer.clip_norm, rule)

    def of_batch(own: list[int]) -> Tensor:
        norms = wanted.norms[own]
        limit = norms.median().clamp(max=answer.clip_norm) if len(own) > 1 else answer.clip_norm
        return (limit / (norms + rule.eps)).clamp(max=1)

    yield _PAIRS, of_pairs
    text = "the clip norm follows the batch: C is lowered to the median norm of each micro-batch"
    yield Cause("C of the batch", text), of_batch


def _paired(squares: Tensor) -> Tensor:
    """[b]: the first two have their mean, the next two theirs; the last is alone if b is odd."""
    found = squares.clone()
    for first in range(0, len(squares) - 1, 2):
        found[first : first + 2] = squares[first : first + 2].mean()
    return found


def _groups(case: TrainingCase, wanted: StepAnswer, step: int) -> Iterator[tuple[list[str], list[list[int]]]]:
    """(whose, rows of the samples that are taken together, a sample as often as it occurs).

    What is the same in this case, as a rank's batch is the whole one on one rank, stands together, plainest first:
    a case that cannot tell two apart speaks for both.
    """
    by_rank, everyone = rows(case, step, wanted)[:: case.copies], chunks(case, step, wanted)[:: case.copies]
    across = zip(*everyone, strict=True)
    every = {
        "the whole batch": [[row for own in by_rank for row in own]],
        "each rank": by_rank,
        "each micro-batch": [own for mine in everyone for own in mine],
        "each micro-batch of all ranks": [[row for own in each for row in own] for each in across],
    }
    left = list(every)
    while left:
        same = [whose for whose in left if every[whose] == every[left[0]]]
        yield same, every[left[0]]
        left = [whose for whose in left if whose not in same]


def _sum(gradients: Named, own: list[int]) -> Named:
    return {name: value[own].sum(0) for name, value in gradients.items()}


def _square(named: Named) -> Tensor:
    return torch.stack([value.square().sum() for value in named.values()]).sum()
