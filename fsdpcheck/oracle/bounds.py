"""Proven error bounds, for what an implementation may round although the data are exact. No tolerance is chosen.

Notation: u is the unit roundoff, one correctly rounded operation has relative error at most u, and k of them at most
gamma(k) = k u / (1 - k u) (Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1). Bounds are Fractions:
they are compared with exact differences, so that the comparison itself rounds nothing.

The clip factor min(1, C / (n + eps)) has a bound for each thing that it is compared with; each counts its roundings:
``factor_bound`` with the answer's factor, which is computed alike (so nothing but a nested norm may differ),
``weight_bound`` with the real number ``exact_factor``, ``factor_range`` with real numbers whose norm is a range;
``checks/privacy.py`` with C over the norm, without eps; ``checks/shape_matched_clipping.py`` with the factor of the
norm that was shown. ``tests/checks/test_clipping.py`` and ``test_shape_matched_clipping.py`` hold them.

Legend: n samples of a step, B of the logical batch, T positions, W ranks, L parameters with a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fsdpcheck.adapters.contract import FactorRule, GlobalNormRule, NormRule
from fsdpcheck.case import LayerSpec, TrainingCase
from fsdpcheck.case.shapes import Stage, stages
from fsdpcheck.exact.grid import exact_square_sum
from fsdpcheck.oracle import Answer, Named, StepAnswer
from fsdpcheck.oracle.certificate import absolute_gradients
from fsdpcheck.oracle.user_model_roundings import path_roundings, terms_of_one
from fsdpcheck.workload import batches, models
from fsdpcheck.workload.clip_groups import column, number

UNIT_ROUNDOFF = {"float64": Fraction(1, 2**53), "float32": Fraction(1, 2**24)}
ROOT = 2
"""What a square root counts for among roundings: it is right to one unit in the last place, 2u, not to u."""
_COMPUTE_ROUNDOFF = {"bfloat16": Fraction(1, 2**9), "tf32": Fraction(1, 2**12)}


def gamma(roundings: Fraction | int, unit: Fraction) -> Fraction:
    """Relative error of a product or quotient of ``roundings`` factors 1 + d with |d| <= ``unit``."""
    return roundings * unit / (1 - roundings * unit)


def nested_norm_bound(terms: Sequence[int], unit: Fraction, further: int = 0) -> Fraction:
    """Relative error of a norm of norms of ... of exact numbers.

    ``terms[j]``: how many values level j squares, adds up (in any order) and takes the root of. A level of m values
    rounds each square once and each sum m - 1 times, which the root halves, and its root (or power 1/2) counts twice:
    m/2 + 2 roundings. Levels add up. ``further``: roundings beside, of a cast or of the sum
    with an eps.
    """
    roundings = sum((Fraction(m, 2) + ROOT for m in terms), Fraction(further))
    return gamma(roundings, unit)


def global_norm_bound(answer: Answer, step: StepAnswer, rule: GlobalNormRule) -> Fraction:
    """Relative error of a global gradient norm formed as ``rule`` declares.

    Nested: over all elements of a piece of a shard, over parameters (or units), over ranks; in each level at most all
    of them. Otherwise one root of one sum. The last cast to the case's dtype is counted, and the sum with an eps.
    """
    dtype = rule.of(answer.case.arithmetic.dtype)
    elements = sum(value.numel() for value in step.released.values())
    levels = (elements, len(step.released), answer.case.world_size) if rule.nested else (elements,)
    further = (dtype != answer.case.arithmetic.dtype) + bool(rule.norm.eps)
    return nested_norm_bound(levels, UNIT_ROUNDOFF[dtype], further)


def sample_norm_bound(answer: Answer) -> Fraction:
    """Relative error of a per-sample norm that is a norm of per-parameter norms of exact gradients; about (L/2 + 5) u.

    Zero if the rule is not nested: then the norm is one root of an exact number, as torch takes it
    (checks/square_roots.py).
    """
    if not answer.rule.nested:
        return Fraction(0)
    return nested_norm_bound((1, len(answer.trainable)), UNIT_ROUNDOFF[answer.case.arithmetic.dtype])


def scaling_rooms(answer: Answer, step: StepAnswer) -> list[Fraction]:
    """By how much each sample's norm may be off, where its losses are divided by a number of samples, and scaled back.

    So does who takes the mean over a rank's samples and multiplies backprops by their number: a third of a gradient is
    on no grid, so each operation of the backward pass may round. Zero where no rank has a number of samples that is no
    power of two, and under a rule that is not nested, or does not divide by a share.
    """
    case = answer.case
    (k,) = (number for number, one in enumerate(answer.steps) if one is step)
    sizes = {len(chunk) for own in batches.indices(case, k) for chunk in own}
    divides = answer.rule.nested and answer.arithmetic.divides_by_share
    if not divides or not any(size & (size - 1) for size in sizes):
        return [Fraction(0)] * len(step.samples)
    paths, bound = absolute_gradients(case, step), path_bound(case)
    of_row = ([value[row] for value in paths.values()] for row in range(len(step.samples)))
    return [bound * square_root(exact_square_sum(own)) for own in of_row]


def factor_room(answer: Answer, step: StepAnswer, row: int, room: Fraction) -> Fraction:
    """By how much a clip factor may be off where its norm is by ``room``."""
    norm = exact_norm(answer, step, row)
    right, *others = (_factor(answer, n) for n in (norm, max(norm - room, Fraction(0)), norm + room))
    return max(abs(other - right) for other in others)


def scaled_factor_bound(answer: Answer, step: StepAnswer) -> Fraction:
    """The largest relative error of a step's clip factors that ``scaling_rooms`` brings, beside ``factor_bound``."""
    rooms = scaling_rooms(answer, step)
    found = (factor_room(answer, step, row, room) / exact_factor(answer, step, row) for row, room in enumerate(rooms))
    return max(found, default=Fraction(0)) if any(rooms) else Fraction(0)


def exact_norm(answer: Answer, step: StepAnswer, row: int, group: int = 0) -> Fraction:
    """The norm of one sample (in one clipping group), to 200 bits."""
    return norm_of(Fraction(float(step.group_squares[row, group])), answer.rule.norm)


def _factor(answer: Answer, norm: Fraction, group: int = 0) -> Fraction:
    return (
        min(Fraction(1), Fraction(answer.clip_norms[group]) / (norm + Fraction(answer.rule.eps)))
        if norm
        else Fraction(1)
    )


def factor_bound(answer: Answer) -> Fraction:
    """Relative error of a clip factor under a nested rule: the norm's, then n + eps, the reciprocal, times C.

    min(1, .) does not enlarge it. Zero if the rule is not nested: the factor is then the same elementwise map of the
    same norm.
    """
    if not answer.rule.nested:
        return Fraction(0)
    unit = UNIT_ROUNDOFF[answer.case.arithmetic.dtype]
    return (1 + gamma(3, unit)) / (1 - sample_norm_bound(answer)) - 1


def weight_bound(answer: Answer) -> Fraction:
    """Relative error of a clip factor against ``exact_factor``, by any rule: root (2), n + eps, quotient, product.

    And the sum with an eps that the norm has. Zero where every factor is 1.
    """
    if answer.case.step.clipping in ("none", "unclipped"):
        return Fraction(0)
    return factor_bound(answer) or gamma(
        ROOT + 3 + bool(answer.rule.norm.eps), UNIT_ROUNDOFF[answer.case.arithmetic.dtype]
    )


def exact_factor(answer: Answer, step: StepAnswer, row: int, group: int = 0) -> Fraction:
    """The clip factor of one sample (in one clipping group) to 200 bits: min(1, C / (n + eps))."""
    if answer.case.step.clipping in ("none", "unclipped"):
        return Fraction(1)
    return _factor(answer, exact_norm(answer, step, row, group), group)


def norm_of(squared: Fraction, rule: NormRule) -> Fraction:
    """The norm of an exact squared norm by ``rule``, to 200 bits."""
    inside, outside = (Fraction(rule.eps) if rule.place == place else Fraction(0) for place in ("inside", "outside"))
    return square_root(squared + inside) + outside


def square_root(value: Fraction) -> Fraction:
    """The square root of value >= 0, rounded down at 200 bits: relative error below 2**-190."""
    if value == 0:
        return Fraction(0)
    shift = max(0, 400 - (value.numerator.bit_length() - value.denominator.bit_length()))
    shift += shift % 2
    return Fraction(math.isqrt((value.numerator << shift) // value.denominator), 1 << (shift // 2))


def probe_roundings(case: TrainingCase, multiplicity: int) -> int:
    """Roundings between a factor and the released gradient of its row of the instrument; 0 if all of it is exact.

    Times the loss scale W, times W/N, sums over occurrences and over the ranks of a replicated batch, divided by W. All
    of that is exact when W is a power of two, a sample occurs at most twice and at most four ranks hold copies of it.
    (In a sum of four equal numbers 3x may round, by less than half a unit of 4x: the end is exact in every order. A sum
    of eight goes through 3x, 5x and 7x, and may end beside 8x.)
    """
    if case.world_size & (case.world_size - 1) == 0 and multiplicity <= 2 and case.copies <= 4:
        return 0
    return 3 + multiplicity * case.copies


def probe_bound(case: TrainingCase, multiplicity: int, contracted: bool = False) -> Fraction:
    """Relative error between a factor and the released gradient of its row of the instrument.

    Computing in low precision a re-weighted backprop is rounded to it, and the gradient that is formed of it again:
    not where it is ``contracted`` from what one backward left.
    """
    error = gamma(probe_roundings(case, multiplicity), UNIT_ROUNDOFF[case.arithmetic.dtype])
    if case.arithmetic.compute != "dtype" and not contracted:
        error = (1 + error) * (1 + gamma(2, _COMPUTE_ROUNDOFF[case.arithmetic.compute])) - 1
    return error


def clipped_gradient_bound(answer: Answer, step: StepAnswer, weights: Tensor, relative: Fraction) -> Named:
    """Elementwise bound on |released gradient - sum_i w_i g_i|, float64, for weights w [n] = factor * multiplicity / N.

    With per-layer clipping w is [n, G], by clipping group.

    ``relative``: the relative error of the weights themselves. The float64 evaluation of the sum is counted too.
    The weights enter at the loss, so each product and sum of the backward pass behind it may round: at most k roundings
    on each path from the loss to an element, hence gamma(k) times the sum of the paths' absolute values.
    """
    case = answer.case
    unit = UNIT_ROUNDOFF[case.arithmetic.dtype]
    backward = (1 + relative) * (1 + gamma(_path_roundings(case), unit)) - 1
    total = float(backward + gamma(2 * len(step.samples) + 8, UNIT_ROUNDOFF["float64"]))
    absolute = absolute_gradients(case, step)
    scale = models.loss_scale(case)
    own = {name: column(weights.abs(), number(case, name)) for name in absolute}
    return {name: torch.tensordot(own[name], value, dims=1) * (scale * total) for name, value in absolute.items()}


def squared_norm_range(case: TrainingCase, gradient: Named, paths: Named) -> tuple[Fraction, Fraction]:
    """(least, most) that the square of a rounded norm of one sample can be, whichever way it is formed.

    ``gradient``: the sample's, from a replay in the same shapes, which may round like any other. ``paths``: the same
    with every path's absolute value added up, so that each evaluation errs by gamma(k) ``paths`` at most, k roundings
    on a path. With H the norm of ``paths``, both algebraic forms of the squared norm, direct sum and Gram <A A^T,
    G G^T>, are sums of products of two paths, whose absolute values add up to H^2 at most: so they err by
    ((1 + gamma(k))^2 (1 + gamma(m)) - 1) H^2, m additions and roots. Where terms cancel, H is large beside the norm,
    and the direct sum is better than that.
    """
    unit = UNIT_ROUNDOFF[case.arithmetic.dtype]
    path = path_bound(case)
    largest = square_root(exact_square_sum(paths.values())) / (1 - 2 * path)
    near = square_root(exact_square_sum(gradient.values()))
    room = ((1 + path) ** 2 * (1 + gamma(_square_roundings(case, gradient), unit)) - 1) * largest**2
    least, most = max(near - path * largest, Fraction(0)), near + path * largest
    return max(least**2 - room, Fraction(0)), (most**2 + room) * (1 + Fraction(1, 2**190))


def path_bound(case: TrainingCase) -> Fraction:
    """Relative to the paths' absolute values: how far any evaluation of a weighted sum of gradients may be off."""
    return gamma(_path_roundings(case) + 4, UNIT_ROUNDOFF[case.arithmetic.dtype])  # 4: losses scaled and scaled back


def factor_range(least: Fraction, most: Fraction, clip_norm: float, rule: FactorRule) -> tuple[Fraction, Fraction]:
    """(least, most) that a clip factor min(1, C / (n + eps)) can be for a squared norm from ``least`` to ``most``.

    Sums, quotient, product and cast round once each, the root counts for more.
    """
    rounding = gamma(ROOT + 4 + bool(rule.norm.eps), UNIT_ROUNDOFF["float64"])
    low, high = (
        norm_of(least, rule.norm) + Fraction(rule.eps),
        norm_of(most, rule.norm) * (1 + Fraction(1, 2**190)) + Fraction(rule.eps),
    )
    bound = Fraction(clip_norm)
    ends = (bound / high * (1 - rounding) if high else bound, bound / low * (1 + rounding) if low else Fraction(1))
    return min(ends[0], Fraction(1)), min(ends[1], Fraction(1))


def _square_roundings(case: TrainingCase, gradient: Named) -> int:
    """Most roundings of a sum of squares, or of products in the Gram form, over elements, positions, parameters, ranks,
    and of roots in between."""
    uses = _uses(case)
    if case.model.own is None:
        positions = uses * max(_positions(stage, case.model.length) for stage in stages(case.model))
    else:
        positions = terms_of_one(case)
    elements = sum(value.numel() for value in gradient.values())
    return 2 * elements + positions**2 + 5 * len(gradient) + case.world_size + 12


def _path_roundings(case: TrainingCase) -> int:
    """Most roundings on one path of the weighted backward pass and the reductions behind it.

    A sum of m products rounds a term m times at most. A path goes through every stage, at one of which it ends in the
    gradient of a parameter: a sum over positions, samples, their occurrences, uses, micro-batches and ranks.
    """
    if case.model.own is not None:
        return 8 + path_roundings(case) + case.step.micro_batches + case.world_size
    chain = stages(case.model)
    backward = models.classes(case) + sum(_through(stage) for stage in chain)
    uses = _uses(case)
    occurrences = max(sum(batches.logical_batch(case, k).values()) for k in range(case.step.steps))
    summed = occurrences * case.copies * max(_positions(stage, case.model.length) for stage in chain) * uses
    return 8 + backward + summed + case.step.micro_batches + case.world_size


def _through(stage: Stage) -> int:
    """Most roundings from the gradient of a stage's output to that of its input, its activation included.

    A layer that runs twice is two layers on the way, and so is one whose weight is used beside it: more than it adds.
    """
    if stage.spec is None:
        return 0
    squashed = stage.leaving[-1] if stage.spec.activation == "softmax" else 0
    if stage.spec.used == "for all":  # what arrives is added to, and not multiplied
        return 4 + squashed
    return (4 + squashed + _layer_roundings(stage, stage.spec)) * (1 + (stage.spec.used in ("twice", "beside")))


def _layer_roundings(stage: Stage, spec: LayerSpec) -> int:
    """The same of the layer alone: sums of products, and the means over a row of h and of h * xhat that norms take."""
    if stage.kind == "conv":
        directions = len(stage.entering) - 1
        around = spec.dilation * (spec.kernel - 1) if spec.same else 2 * spec.padding  # copies of one number, in all
        copies = math.prod([1 + around] * directions) if spec.padding_mode != "zeros" else 0
        return spec.width // spec.groups * math.prod([spec.kernel] * directions) + copies
    if stage.kind == "group_norm":
        return math.prod(stage.entering) // spec.groups + 8
    if stage.kind in ("layer_norm", "rms_norm"):
        return stage.entering[-1] + 8
    if stage.kind == "attention":  # the output's projection, weights or values, softmax, queries or keys, projections
        length, width = stage.entering
        if spec.heads:  # products within a head; queries, keys and values are one projection of three times the width
            return width + width // spec.heads + 2 * length + 4 + 3 * width + 4
        return width + max(length, width + length + 4 + length) + width + 4
    return spec.width


def _uses(case: TrainingCase) -> int:
    """How often one parameter is used in a forward, at most."""
    more = any(layer.used in ("twice", "beside") for layer in case.model.layers)
    return 2 if case.model.tied is not None or more else 1


def _positions(stage: Stage, length: int) -> int:
    """How many terms of one sample the gradient of a parameter of this stage adds up, at most."""
    if stage.kind in ("embedding", "embedding_bag"):
        return length
    return math.prod(stage.leaving[1:] if stage.channels_first else stage.leaving[:-1])


def exact_global_norm_squared(step: StepAnswer) -> Fraction:
    """Squared norm of the released gradient, exactly."""
    return exact_square_sum(step.released.values())
