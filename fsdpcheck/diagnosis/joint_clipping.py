"""Joint clipping: samples that are clipped, or measured, as one sum, where each has to be taken alone.

Legend: n samples of a step, b in a group of them, W ranks, C the clip norm, N the normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis.cause_fit import chunks, rows
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named, StepAnswer
from fsdpcheck.workload import models

_EPS = (0.0, 1e-6)  # what implementations add to the norm of a whole gradient
_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {"median": torch.median, "mean": torch.mean}
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
    for same, groups in _groups(case, wanted, step):
        sums = [_sum(wanted.gradients, own) for own in groups]
        for key, word, scales, shares in _scales(case, groups):
            for eps in sorted({*_EPS, answer.rule.eps}):
                weights = [
                    _factor(total, scale, answer.clip_norm, eps) * share
                    for total, scale, share in zip(sums, scales, shares, strict=True)
                ]
                text = f"the {word} gradient of {same[0]} is clipped, not each sample's: {_INSTEAD}"
                released = _weighted(sums, weights)
                yield from ((Cause(f"{key} gradient of {whose} clipped", text), released) for whose in same)


def norms(answer: Answer, step: int, rank: int) -> Iterator[tuple[Cause, Tensor]]:
    """Squared norms [n] of the gradient of a whole micro-batch, or of a rank's batch, given to each of its samples."""
    case, wanted = answer.case, answer.steps[step]
    if not wanted.samples:
        return
    everyone = chunks(case, step, wanted)[rank]
    for whose, groups in (("micro-batch", everyone), ("local batch", [[row for own in everyone for row in own]])):
        squares = {"sum": wanted.squared_norms.clone(), "mean": wanted.squared_norms.clone()}
        for own in groups:
            whole = _square(_sum(wanted.gradients, own))
            squares["sum"][own], squares["mean"][own] = whole, whole / max(len(own), 1) ** 2
        for word, squared in squares.items():
            text = f"each sample is given the norm of the gradient of the whole {whose} (its {word}), not its own"
            yield Cause(f"norm of the {word} of a {whose}", text), squared


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

    yield _PAIRS, of_pairs
    for word, statistic in _STATISTICS.items():

        def of_batch(own: list[int], statistic: Callable[[Tensor], Tensor] = statistic) -> Tensor:
            norms = wanted.norms[own]
            limit = statistic(norms).clamp(max=answer.clip_norm) if len(own) > 1 else answer.clip_norm
            return (limit / (norms + rule.eps)).clamp(max=1)

        text = f"the clip norm follows the batch: C is lowered to the {word} norm of each micro-batch"
        yield Cause(f"C of the batch: {word}", text), of_batch


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


def _scales(case: TrainingCase, groups: list[list[int]]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """(key, "summed" or "mean", by group what its sum is multiplied by when it is clipped, and when it is released)."""
    n, count = float(case.step.normaliser), len(groups)
    plain = [1 / n] * count
    yield "summed", "summed", [1.0] * count, plain
    yield "mean", "mean", plain, plain
    yield "scaled mean", "mean", [case.shares / n] * count, plain
    local = [1 / max(len(own), 1) for own in groups]
    yield "local mean", "mean", local, plain
    yield "mean of local means", "mean", local, [each / count for each in local]


def _factor(total: Named, scale: float, clip_norm: float, eps: float) -> float:
    norm = float(_square(total)) ** 0.5 * scale
    return min(1.0, clip_norm / (norm + eps)) if norm + eps else 1.0


def _sum(gradients: Named, own: list[int]) -> Named:
    return {name: value[own].sum(0) for name, value in gradients.items()}


def _square(named: Named) -> Tensor:
    return torch.stack([value.square().sum() for value in named.values()]).sum()


def _weighted(sums: list[Named], weights: list[float]) -> Named:
    return {
        name: torch.stack([own[name] * weight for own, weight in zip(sums, weights, strict=True)]).sum(0)
        for name in sums[0]
    }
