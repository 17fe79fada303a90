"""One sample's gradient at a time, on real numbers: replayed in the shapes its rank had, with bounds on its roundings.

The replay of a micro-batch in which one sample alone has a weight gives that sample's gradient g, and beside it the
absolute values of all paths, h. Every evaluation of a weighted sum of gradients whose forward has the replay's bits
errs by gamma(k) sum |weights| h at most, k roundings on a path: two backward passes, bookkeeping and ghost norms alike.

Not bounded: what is formed by forwards of other shapes (layers of a user's own, under vmap), and float32, in which the
replay would have to be followed through the forward too.

Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.shape_matched_replay import local_losses, parameters_before
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.absolute_backward import TruePaths
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.oracle import Named, batched_step, bounds
from fsdpcheck.oracle.certificate import traced_gradients
from fsdpcheck.workload import batches


@dataclass(frozen=True)
class Alone:
    """A sample of a rank: its gradient, scaled as its loss is, the absolute values of all paths to it, and the ends of
    what the square of its rounded norm may be."""

    sample: int
    gradient: Named
    paths: Named
    least: Fraction
    most: Fraction


Seen = dict[tuple[object, ...], list[Alone]]


def require_bounded(case: TrainingCase) -> None:
    """Raise NotExact for a case that is not bounded here."""
    if case.arithmetic.dtype != "float64":
        raise NotExact("norms on real numbers are bounded for float64 only")


def samples_of(execution: Execution, result: RankResult, k: int, seen: Seen) -> Iterator[Alone]:
    """A rank's samples at one step, in the order of its micro-batches.

    ``seen`` keeps micro-batches of this execution: those of a replicated batch are the same on every rank.
    """
    case = execution.request.training
    before = parameters_before(result, k, case)
    for micro in batches.batch(case, k, result.rank, execution.request.instrument).micro_batches:
        if not micro.indices:
            continue
        key = (k, micro.indices, *sorted(result.placement.items()))
        if key not in seen:
            losses, trained = local_losses(case, before, micro, result.placement)
            seen[key] = [_alone(case, losses, trained, *each) for each in enumerate(micro.indices)]
        yield from seen[key]


def _alone(case: TrainingCase, losses: Tensor, trained: Mapping[str, nn.Parameter], place: int, sample: int) -> Alone:
    weights = torch.zeros_like(losses)
    weights[place] = 1
    traced = traced_gradients if case.model.own is None else _traced
    gradient, paths = traced(losses, trained, weights, keep=True)
    return Alone(sample, gradient, paths, *bounds.squared_norm_range(case, gradient, paths))


def _traced(losses: Tensor, trained: Mapping[str, nn.Parameter], weights: Tensor, keep: bool) -> tuple[Named, Named]:
    """``proof.traced_gradients`` of a user's own model, with its true functions."""
    with TruePaths(weights) as paths:
        gradients = batched_step.gradients(losses, dict(trained), weights, keep)
    found = dict(zip(trained, gradients, strict=True))
    return found, {name: paths.terms(value) for name, value in found.items()}
