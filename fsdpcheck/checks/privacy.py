"""Checks of two runs on neighbouring batches: how far one record moves the released sum, and what it must not move.

Legend: N the normaliser, C the clip norm, the root of the sum of C_l^2 where groups of parameters are clipped apart, k
how many clip norms the neighbours may be apart, n samples, G clipping groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from fsdpcheck.checks import noise_draws
from fsdpcheck.checks._compare import alike, first_apart, first_index, number, require_same_form
from fsdpcheck.checks._read import completed, recorded
from fsdpcheck.checks.invariance import Side
from fsdpcheck.diagnosis import noise, of_gradient
from fsdpcheck.diagnosis.collectives import of_neighbours
from fsdpcheck.errors import NotExact
from fsdpcheck.execution import Execution
from fsdpcheck.execution.trace import Trace
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.oracle import Answer, StepAnswer, bounds, standards
from fsdpcheck.strategies.neighbours import Neighbours
from fsdpcheck.workload import batches, clip_groups

Noisy = tuple[Execution, Execution, Answer]
"""A noisy run, the same without noise, and the answer of the noisy one, which says what is right but for the noise."""
Gradients = tuple[Tensor, Tensor]
"""One parameter's, with noise and without it."""


def assert_sensitivity(pair: Neighbours, first: Side, second: Side, step: int = 0) -> Fraction:
    """At ``step``, N times the released gradients of neighbours are at most k * C apart, over all parameters.

    Both have the same parameters before it. Decided in exact arithmetic, with room for what a theorem lets the weighted
    sums and the clip factors round. Returns how far they are apart over k * C, the most on any rank.
    """
    (one, answer), (other, _) = first, second
    completed(one), completed(other)
    for execution, right in (first, second):
        for rank, grads in recorded(execution, step, "grads"):
            what = "the released gradient is not of every trained parameter"
            require_same_form(what, grads, right.steps[step].used, f"step {step}, rank {rank}, {pair.words}")
    allowed, most = pair.times**2 * _sensitivity_squared(answer), Fraction(0)
    limit = functools.cache(partial(_limit, pair, first, second, step))
    for (rank, a), (_, b) in zip(recorded(one, step, "grads"), recorded(other, step, "grads"), strict=True):
        squared = _distance_squared(a, b) * Fraction(answer.case.step.normaliser) ** 2
        most = max(most, squared)
        if squared > allowed and squared > limit() ** 2:  # what may be rounded takes long to know
            raise Violation(
                "one record moves the released sum by more than its clip norm allows",
                got=f"{float(bounds.square_root(squared / _sensitivity_squared(answer)))!r} * C",
                wanted=f"at most {pair.times} * C, C = {math.hypot(*answer.clip_norms)!r}",
                where=f"step {step}, rank {rank}, {pair.words}",
                cause=partial(_of_wrong, first, second, step),
            )
    return bounds.square_root(most / allowed)


def assert_others_keep_their_coefficient(pair: Neighbours, first: Side, second: Side, step: int = 0) -> None:
    """At ``step`` the coefficient of each record that did not move is the same in both runs, bit for bit.

    Read from the instrument, in the family "probe": its row i holds the coefficient of record i. Raises NotExact where
    there is no such record.
    """
    one, other = first[0], second[0]
    completed(one), completed(other)
    records = kept(pair, step)
    if not records:
        raise NotExact("no record is in both batches, so none can keep its coefficient")
    for (rank, a), (_, b) in zip(recorded(one, step, "grads"), recorded(other, step, "grads"), strict=True):
        for name in clip_groups.instruments(pair.first):
            mine, theirs = a[name].flatten()[records], b[name].flatten()[records]
            if alike(mine, theirs):
                continue
            place = int((mine != theirs).nonzero()[0])
            raise Violation(
                "the coefficient of a record depends on which others there are",
                got=number(theirs[place]),
                wanted=number(mine[place]),
                where=f"step {step}, rank {rank}, record {records[place]}, {name}; {pair.words}",
                cause=partial(_of_weights, first, second, step),
            )


def kept(pair: Neighbours, step: int) -> list[int]:
    """Records, by their place in the batch, that did not move; none where no batch of ``step`` has one of them."""
    size = pair.first.layout.batch_size
    batch = batches.logical_batch(pair.first, step)
    found = [record for record in range(size) if record not in pair.moved]
    return found if any(step * size + record in batch for record in found) else []


def assert_same_noise(pair: Neighbours, first: Noisy, second: Noisy) -> None:
    """The noise of every parameter, on every rank and at every step, is the same in both runs.

    Noise is the difference of the noisy run and the clean one, which have the same parameters at every step; two such
    differences are of one draw only if they are no farther apart than what rounding puts between draw and difference.
    """
    runs = (*first[:2], *second[:2])
    for run in runs:
        completed(run)
    for step in range(pair.first.step.steps):
        for (rank, a), *others in zip(*(recorded(run, step, "grads") for run in runs), strict=True):
            where = f"step {step}, rank {rank}"
            for _, other in others:
                require_same_form("gradients of neighbours have other forms", other, a, f"{where}, {pair.words}")
            quiet, b, calm = (other for _, other in others)
            cause = partial(_of_noise, first, second, rank, a, b) if step == 0 else partial(_of_later, step)
            for name in a:
                mine, theirs = (a[name], quiet[name]), (b[name], calm[name])
                _require_same_draws(mine, theirs, f"{where}, {name}", pair.words, cause)


def _require_same_draws(first: Gradients, second: Gradients, where: str, words: str, cause: Diagnose) -> None:
    unit = torch.finfo(first[0].dtype).eps / 2
    (mine, room), (theirs, other) = (_drawn(noisy.double(), clean.double(), unit) for noisy, clean in (first, second))
    apart = ~((mine - theirs).abs() <= room + other)
    if bool(apart.any()):
        index = first_index(apart)
        raise Violation(
            "noise depends on one record",
            got=f"a draw of {number(theirs[index])}",
            wanted=f"{number(mine[index])}, up to rounding",
            where=f"{where}{list(index)}; {int(apart.sum())} of {apart.numel()}; {words}",
            cause=cause,
        )


def _drawn(noisy: Tensor, clean: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """(noise as computed, how far it may be from what was drawn)."""
    drawn = noisy - clean
    return drawn, noise_draws.room(drawn, clean, unit)


def assert_same_calls(pair: Neighbours, one: Execution, other: Execution) -> None:
    """Every rank took every step and made the same collectives: their number, order, groups, types and sizes."""
    for mine, theirs in zip(completed(one), completed(other), strict=True):
        a, b = _shapes(mine.trace), _shapes(theirs.trace)
        if (at := first_apart(a, b)) is not None:
            raise Violation(
                "what is sent depends on one record",
                got=str(theirs.trace[at]) if at < len(b) else f"{len(b)} collectives",
                wanted=str(mine.trace[at]) if at < len(a) else f"{len(a)} collectives",
                where=f"collective {at} of rank {mine.rank}, {pair.words}",
                cause=partial(of_neighbours, pair.first, pair.second, mine, theirs, at),
            )


def _limit(pair: Neighbours, first: Side, second: Side, step: int = 0) -> Fraction:
    """k * C, and what may be rounded of both released sums."""
    room = sum((_room(answer, answer.steps[step]) for _, answer in (first, second)), Fraction(0))
    answer = first[1]
    bound = _root_above(_sensitivity_squared(answer))
    return pair.times * bound * (1 + _of_factors(answer)) + Fraction(answer.case.step.normaliser) * room


def _sensitivity_squared(answer: Answer) -> Fraction:
    """C^2, the sum over the clipping groups."""
    return sum((Fraction(own) ** 2 for own in answer.clip_norms), Fraction(0))


def _root_above(value: Fraction) -> Fraction:
    """A square root, rounded up."""
    return bounds.square_root(value) * (1 + Fraction(1, 2**190))


def _room(answer: Answer, step: StepAnswer) -> Fraction:
    """Bound on the norm of released gradient - (1/N) sum c_i g_i, c_i the answer's clip factors; 0 if that is exact."""
    if standards.every_bit(standards.of(answer.case, answer.rule)) or not step.samples:
        return Fraction(0)
    counts = torch.tensor(step.multiplicity, dtype=torch.float64)
    weights = step.factors.double() * counts.reshape(-1, *[1] * (step.factors.dim() - 1)) / answer.case.step.normaliser
    relative = 2 * (_of_factors(answer) + bounds.scaled_factor_bound(answer, step))
    off = bounds.clipped_gradient_bound(answer, step, weights, relative)
    squares = sum((Fraction(value) ** 2 for each in off.values() for value in each.flatten().tolist()), Fraction(0))
    return _root_above(squares)


def _of_factors(answer: Answer) -> Fraction:
    """Relative error of a clip factor against min(1, C / norm): norm's, root's, norm + eps, quotient, product."""
    unit = bounds.UNIT_ROUNDOFF[answer.case.arithmetic.dtype]
    return (1 + bounds.gamma(bounds.ROOT + 3, unit)) / (1 - bounds.sample_norm_bound(answer)) - 1


def _distance_squared(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Fraction:
    """Exactly; infinite differences and NaN raise Violation, for they are no numbers to compare."""
    total = Fraction(0)
    for name in a:
        for x, y in zip(a[name].flatten().tolist(), b[name].flatten().tolist(), strict=True):
            if x != y:
                total += (_finite(name, x) - _finite(name, y)) ** 2
    return total


def _finite(name: str, value: float) -> Fraction:
    if value != value or value in (float("inf"), float("-inf")):
        raise Violation(
            "a released gradient is not finite", got=str(value), wanted="a number", where=f"gradient of {name}"
        )
    return Fraction(value)


def _shapes(trace: Trace) -> list[tuple[object, ...]]:
    return [(*call.fingerprint, call.group, call.group_name, call.subject) for call in trace]


def _of_wrong(first: Side, second: Side, step: int) -> Causes | None:
    """Causes of the first of the two released gradients that is not its own right answer."""
    for execution, answer in (first, second):
        got = next(iter(recorded(execution, step, "grads")))[1]
        if any(not alike(got.get(name), value) for name, value in answer.steps[step].used.items()):
            return of_gradient(answer, step, got)
    return None


def _of_weights(first: Side, second: Side, step: int) -> Causes | None:
    """The same where other records weigh otherwise; of a step after the first, whose sums may be right before."""
    found = list(_of_wrong(first, second, step) or ())
    if step:
        text = f"in step {step} the weight of a sample follows other records, of this step or of those before"
        found.append(Cause("weights by other records", f"{text}, beyond what was released", PATTERN))
    return found


def _of_noise(
    first: Noisy, second: Noisy, rank: int, one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> Causes | None:
    return noise.of_neighbours((first[2], one), (second[2], other), rank)


def _of_later(step: int) -> Causes:
    """All steps before have the same noise, though their batches differed too."""
    text = (
        f"the draws of step {step} depend on the batches of the steps before: what is drawn is counted by their records"
    )
    return [Cause("later draws", text, PATTERN)]
