"""Per-sample clipping on real numbers: the factors a rank reported, and what was released, whatever it reported.

Released is (1/N) sum c_i g_i with c_i = min(1, C / (|g_i| + eps)). checks/per_sample_replay.py bounds how far any
evaluation of g_i and |g_i| may be off, and so of c_i. No reported number is taken as given, so a step that
does not clip, or clips by norms that are too small, cannot hold. In a batch of one sample that is the sensitivity
itself: nothing larger than C is released, within what is proved.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule, Unused
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import differing, require_no_row, require_none, require_row_form, require_same_form
from fsdpcheck.checks._read import completed, local_samples, recorded
from fsdpcheck.checks.per_sample_replay import Alone, Seen, require_bounded, samples_of
from fsdpcheck.checks.shape_matched_replay import trained_names, without_gradient
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.oracle import Named, bounds
from fsdpcheck.workload import batches, models

_UNCLIPPED = Cause("not clipped", "nothing is clipped: every sample has weight 1")


def assert_factors_follow(execution: Execution, rule: FactorRule) -> None:
    """Every reported clip factor is ``rule`` of the norm that was reported beside it, bit for bit.

    Under a nested rule: within the bounds of both, for the norm may be put together otherwise than the factor's.
    """
    completed(execution)
    case, what = execution.request.training, "clip factors are not the declared rule of the reported norms"
    room = _nested_room(case) if rule.nested else None
    for k in range(case.step.steps):
        reports = zip(recorded(execution, k, "norms"), recorded(execution, k, "factors"), strict=True)
        for (rank, norms), (_, factors) in reports:
            samples, where = local_samples(case, k, rank), f"step {k}, rank {rank}"
            require_row_form("per-sample gradient norms are wrong", norms, norms.new_zeros(len(samples)), where)
            wanted = oracle.factors(norms, execution.request.clip_norm, rule)
            require_row_form(what, factors, wanted, where)
            wrong = differing(factors, wanted)
            if room is not None:
                wrong &= (factors - wanted).abs() > room * wanted
            require_no_row(what, factors, wanted, wrong, samples, where, partial(_of_factors, factors))


def _nested_room(case: TrainingCase) -> float:
    unit = bounds.UNIT_ROUNDOFF[case.arithmetic.dtype]
    norm = bounds.nested_norm_bound((1, len(trained_names(case))), unit)
    return math.nextafter(float((1 + bounds.gamma(6, unit)) * (1 + norm) / (1 - norm) - 1), math.inf)


def _of_factors(got: Tensor) -> Causes:
    """Whether no sample is clipped although some are to be."""
    return [_UNCLIPPED] if bool((got == 1).all()) else []


def assert_clipped_sum_near(execution: Execution, rule: FactorRule, unused: Unused = "none") -> None:
    """The released gradient is (1/N) sum c_i g_i of clipped per-sample gradients, elementwise within the proven bound.

    ``unused``: what a parameter has that no sample of a step depends on (ArithmeticRule.unused).

    Black box: c_i and g_i are the replay's own. For float64 cases whose operators all have a rule of their paths;
    raises NotExact for others.
    """
    case = execution.request.training
    require_bounded(case)
    completed(execution)
    what = "the released gradient is not the sum of clipped per-sample gradients"
    for k in range(case.step.steps):
        parts = list(_parts(execution, k))
        wanted, room = _clipped_sum(case, parts, execution.request.clip_norm, rule)
        for name in without_gradient(execution, k, [own.gradient for _, own in parts], unused):
            del wanted[name], room[name]
        for rank, got in recorded(execution, k, "grads"):
            where = f"step {k}, rank {rank}"
            require_same_form(what, got, wanted, where)
            wrong = _beyond(got, wanted, room)
            require_none(what, got, wanted, wrong, where, partial(_of_sum, case, parts, got))


def _parts(execution: Execution, k: int) -> Iterator[tuple[float, Alone]]:
    """(share of the average, sample) of every rank's samples at one step."""
    case = execution.request.training
    seen: Seen = {}
    for result in execution.ranks:
        share = batches.batch(case, k, result.rank).loss_scale / case.world_size
        yield from ((share, own) for own in samples_of(execution, result, k, seen))


def _clipped_sum(
    case: TrainingCase, parts: list[tuple[float, Alone]], clip_norm: float, rule: FactorRule
) -> tuple[Named, Named]:
    """(sum, how far off it may be) elementwise; float64.

    Both this sum and the released one err by the path bound. It also covers the roundings of this evaluation, of which
    there are a few for each term.
    """
    path = bounds.path_bound(case)
    relative = float((2 * path + bounds.gamma(4 * len(parts) + 32, bounds.UNIT_ROUNDOFF["float64"])) / (1 - 2 * path))
    wanted, room = _zeros(case), _zeros(case)
    for share, own in parts:
        low, high = bounds.factor_range(own.least, own.most, clip_norm, rule)
        middle = float((low + high) / 2)
        half = max(high - Fraction(middle), Fraction(middle) - low)
        for name, gradient in own.gradient.items():
            wanted[name] += middle * share * gradient
            room[name] += share * (_upward(half) * gradient.abs() + _upward(high) * relative * own.paths[name])
    return wanted, room


def _zeros(case: TrainingCase) -> Named:
    shapes = {name: value.shape for name, value in models.initial_parameters(case).items()}
    return {name: torch.zeros(shapes[name], dtype=torch.float64) for name in trained_names(case)}


def _upward(value: Fraction) -> float:
    return math.nextafter(float(value), math.inf)


def _beyond(got: Named, wanted: Named, room: Named) -> Named:
    """Masks of elements farther from what is wanted than there is room, by name, of those that have some."""
    masks = {name: ~((got[name] - value).abs() <= room[name]) for name, value in wanted.items() if name in got}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def _of_sum(case: TrainingCase, parts: list[tuple[float, Alone]], got: Named) -> Causes:
    """Whether the gradient is that of a step that does not clip."""
    unclipped, room = _clipped_sum(case, parts, sys.float_info.max, FactorRule())
    return [] if _beyond(got, unclipped, room) else [_UNCLIPPED]
