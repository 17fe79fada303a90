"""Diagnosis: finds the known mistakes that would have computed what was got. Never part of a verdict.

Each cause says what a known mistake would have computed: one weight per sample (a wrong gradient is a wrongly
weighted sum of per-sample gradients), one vector, or a whole gradient. All that fit are given, with keys that are the
same in every case; judging/attribution.py keeps those that fit every failing case. None instead of a list: the case
cannot tell.

Legend: n samples of a step, b on one rank, W ranks, S shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import (
    checkpoint,
    clip_factors,
    conventions,
    joint_clipping,
    matrix_updates,
    noise,
    norms,
    other_updates,
    per_layer_clipping,
    precision,
    sample_weights,
    shards,
    stale_state,
    step_counts,
    tied_uses,
)
from fsdpcheck.diagnosis.cause_fit import (
    ADDED_UP,
    by_ratio,
    chunks,
    differs,
    fits,
    fitting,
    mentions,
    rounding,
    rows,
    singled_out,
)
from fsdpcheck.diagnosis.collectives import of_failure
from fsdpcheck.diagnosis.contributions import of_rank, pick, weighted
from fsdpcheck.diagnosis.global_norm import of_clipped_update, of_grad_norm
from fsdpcheck.diagnosis.initial_parameters import of_buffers, of_rounded_start, of_start
from fsdpcheck.diagnosis.shards import stood_still
from fsdpcheck.findings.cause import DID_NOT_MOVE, PATTERN, Cause, Causes
from fsdpcheck.oracle import INSTRUMENT, Answer, Named, StepAnswer
from fsdpcheck.workload.optimizer import at_step

__all__ = [
    "checkpoint",
    "conventions",
    "noise",
    "of_buffers",
    "of_clipped_update",
    "of_deferred",
    "of_factors",
    "of_failure",
    "of_grad_norm",
    "of_gradient",
    "of_initial",
    "of_norms",
    "of_order",
    "of_padding",
    "of_rounded_start",
    "of_start",
    "of_terms",
    "of_update",
    "stood_still",
]


def of_update(answer: Answer, step: int, got: Mapping[str, Tensor]) -> Causes | None:
    """Causes of wrong parameters after ``step`` (whose parameters before were right)."""
    case, wanted = answer.case, answer.steps[step]
    if trained := [name for name in _frozen(wanted) if bool((got[name] != wanted.before[name]).any())]:
        return [_trained(trained)]
    if len(answer.clip_norms) > 1:
        return _of_groups(answer, step, *_given(case, wanted, step, got)) if _readable(case) else None
    found = list(stood_still(case, wanted.before, {name: wanted.after[name] for name in wanted.used}, got))
    found += precision.updated(case, {name: wanted.after[name] for name in wanted.used}, got)
    found += matrix_updates.updated(answer, step, got)
    found += step_counts.updated(answer, step, got)
    found += other_updates.of_lost_groups(answer, step, got)
    if (explains := conventions.updated(case, wanted.before, step)) is not None:
        found += conventions.undeclared(answer, step, got, explains)
    found += _still(wanted, got)
    if any(cause.key == DID_NOT_MOVE for cause in found):
        return found  # whatever the gradient was: what leaves samples out would explain it too
    if not _readable(case):
        return found or None
    given, slack = _given(case, wanted, step, got)
    if _within(case, wanted, given, slack):
        undeclared = clip_factors.undeclared_in(answer, step, got, explains) if explains is not None else []
        return [*undeclared, *found] or None
    return [*_of_given(answer, step, given, slack), *found]


def of_gradient(answer: Answer, step: int, got: Mapping[str, Tensor]) -> Causes | None:
    """Causes of a wrong released gradient."""
    wanted = answer.steps[step]
    if trained := [name for name in _frozen(wanted) if name in got and bool(got[name].any())]:
        return [_trained(trained)]
    given = {name: got[name].double() for name in wanted.used}
    slack = {name: torch.zeros_like(value) for name, value in given.items()}
    if len(answer.clip_norms) > 1:
        return _of_groups(answer, step, given, slack)
    found = list(conventions.undeclared(answer, step, got, lambda gradient: {n: gradient[n] for n in wanted.used}))
    if answer.case.step.max_grad_norm is not None:
        return found or None
    if _within(answer.case, wanted, given, slack):
        return [*clip_factors.undeclared_in(answer, step, got, dict), *found] or None
    return [*_of_given(answer, step, given, slack), *found]


def _frozen(wanted: StepAnswer) -> list[str]:
    """Names of the parameters that are not trained."""
    return [name for name in wanted.before if name not in wanted.gradients]


def _trained(names: list[str]) -> Cause:
    return Cause("frozen", f"{mentions(names)}: frozen (requires_grad=False), and trained all the same")


def of_initial(answer: Answer, got: Mapping[str, Tensor], everyone: Sequence[Mapping[str, Tensor]] = ()) -> Causes:
    """Causes of parameters that are wrong before the first step; ``everyone``: those of all ranks."""
    case, right = answer.case, answer.steps[0].before
    found = list(shards.shifted(case, right, got, answer.trainable))
    wrong = [rank for rank, own in enumerate(everyone) if differs(own, right)]
    if case.mesh.dp_replicate > 1 and wrong == list(range(case.mesh.dp_shard, len(everyone))):
        text = "replicas other than the first start from other parameters: those of replica 0 are not broadcast"
        found.append(Cause("replicas apart", text))
    return found


def of_norms(answer: Answer, step: int, rank: int, got: Tensor) -> Causes | None:
    """Causes of wrong per-sample norms [b] of ``rank``."""
    wanted = answer.steps[step]
    mine = rows(answer.case, step, wanted)[rank]
    if fits(answer.case, got, wanted.norms[mine]):
        return None
    found = fitting(answer.case, got, ((s, value[mine]) for s, value in norms.candidates(answer, step, rank)))
    by_step = [own.norms[rows(answer.case, k, own)[rank]] for k, own in enumerate(answer.steps[: step + 1])]
    found += fitting(answer.case, got, stale_state.norms(answer.case, step, by_step))
    return found + list(_of_vector(answer.case, wanted.norms, wanted, step, rank, got, "norm"))


def of_factors(answer: Answer, step: int, rank: int, got: Tensor) -> Causes | None:
    """Causes of wrong clip factors [b] of ``rank``."""
    wanted = answer.steps[step]
    mine = rows(answer.case, step, wanted)[rank]
    if fits(answer.case, got, wanted.factors[mine]):
        return clip_factors.undeclared(answer, step, mine, got)
    found = fitting(answer.case, got, ((s, value[mine]) for s, value in clip_factors.candidates(answer, step, rank)))
    found += clip_factors.other_limit(answer, step, mine, got)
    return found + list(_of_vector(answer.case, wanted.factors, wanted, step, rank, got, "factor"))


def of_order(case: TrainingCase, step: int, wanted: StepAnswer, got: Tensor) -> Causes:
    """Causes of norms [B] that are not in dataset order."""
    by_rank = torch.cat([wanted.norms[own] for own in rows(case, step, wanted)])
    right = wanted.norms.repeat_interleave(torch.tensor(wanted.multiplicity))
    if torch.equal(by_rank, got) and not torch.equal(by_rank, right):
        text = "the norms are in the order of the ranks, not of the samples: not sorted by index after the gather"
        return [Cause("rank order", text)]
    return []


def of_padding(moment: str, shard: str) -> Causes:
    """Causes of padding that is not zero, first seen at ``moment``."""
    gradient = shard.endswith("gradient")
    said = {
        "after_init": "when the parameters are sharded, before any step",
        "after_reduce": "when gradients are reduced" if gradient else "in parameters, before the optimizer's step",
        "before_step": "by clipping or noise" if gradient else "in parameters, before the optimizer's step",
        "after_step": "at the optimizer's update",
    }
    return [Cause(f"{moment} {gradient}", f"padding becomes non-zero {said.get(moment, moment)}")]


def of_deferred(
    case: TrainingCase, immediate: Sequence[Tensor], deferred: Sequence[Tensor], step: int
) -> Causes | None:
    """Causes of deferred norms [b] of one rank that differ at ``step``; both by step, those before ``step`` equal."""
    if fits(case, deferred[step], immediate[step]):
        return None
    return fitting(case, deferred[step], stale_state.norms(case, step, immediate))


def of_terms(
    case: TrainingCase,
    got: Mapping[str, Tensor],
    terms: Sequence[Sequence[Named]],
    reweighed: Iterator[tuple[Cause, Named]],
) -> Causes | None:
    """Causes of a gradient that is not the average of ``terms``, each rank's by micro-batch, sums over samples.

    ``reweighed``: whole gradients that other weights of samples would give. None for one that is right up to rounding.
    """
    numbers = itertools.count()
    count = case.step.micro_batches
    everyone = [[[next(numbers)] for _ in mine] + [[]] * (count - len(mine)) for mine in terms]
    stacked = {name: torch.stack([own[name].double() for mine in terms for own in mine]) for name in terms[0][0]}
    room = {name: rounding(case, value.abs().sum(0)) for name, value in stacked.items()}
    once = torch.full((next(numbers),), 1 / case.world_size, dtype=torch.float64)

    def near(value: Named) -> bool:
        return all(bool(((got[n].double() - value[n].double()).abs() <= room[n]).all()) for n in got)

    right = weighted(stacked, once)
    if near(right):
        return None
    local = [weighted(stacked, pick(once, [row for own in mine for row in own])) for mine in everyone]
    by_weights = itertools.chain(
        ((cause, once * ratio) for cause, ratio in by_ratio(case, 0, "ratio", sample_weights.TIMES, ADDED_UP)),
        sample_weights.of_ranks(case, everyone, once),
    )
    whole = ((cause, weighted(stacked, weights)) for cause, weights in by_weights)
    every = itertools.chain(whole, shards.unreduced(case, local, right), reweighed)
    return [cause for cause, value in every if near(value)]


def _of_given(answer: Answer, step: int, given: Named, slack: Named) -> Iterator[Cause]:
    """Causes that explain a whole gradient ``given``, up to ``slack``."""
    case, wanted = answer.case, answer.steps[step]
    magnitude = {name: value.abs().sum(0) / case.step.normaliser for name, value in wanted.gradients.items()}
    for cause, share in sample_weights.candidates(answer, step):
        terms = weighted({name: g.abs() for name, g in wanted.gradients.items()}, share.abs())
        if _explains(case, weighted(wanted.gradients, share), given, slack, terms):
            yield cause
    local = [weighted(wanted.gradients, of_rank(answer, step, rank)) for rank in range(case.world_size)]
    whole = (
        *shards.unreduced(case, local, {name: value.double() for name, value in wanted.released.items()}),
        *stale_state.gradients(answer, step),
        *joint_clipping.clipped(answer, step),
        *tied_uses.gradients(answer, step),
    )
    for cause, value in whole:
        if _explains(case, value, given, slack, magnitude):
            yield cause
    yield from precision.rounded(
        answer, step, lambda value: _explains(case, value, {name: given[name] for name in value}, slack, magnitude)
    )
    if case.step.clipping == "probe":
        yield from _of_probe(answer, step, given, slack)


def _of_groups(answer: Answer, step: int, given: Named, slack: Named) -> Causes | None:
    """Causes of wrong clipping by group; None where none fits, for little is known of such cases."""
    case, wanted = answer.case, answer.steps[step]
    magnitude = {name: value.abs().sum(0) / case.step.normaliser for name, value in wanted.gradients.items()}
    if _within(case, wanted, given, slack):
        return None
    told = per_layer_clipping.gradients(answer, step)
    return [cause for cause, value in told if _explains(case, value, given, slack, magnitude)] or None


def _readable(case: TrainingCase) -> bool:
    """Whether an update shows the gradient that the optimizer was given, and that is the released one."""
    return case.step.optimizer.kind == "sgd" and case.step.max_grad_norm is None


def _given(case: TrainingCase, wanted: StepAnswer, step: int, got: Mapping[str, Tensor]) -> tuple[Named, Named]:
    """(the gradient that leads to the parameters ``got``, what of it may be rounding)."""
    rate = 2.0 ** -at_step(case.step.optimizer, step).lr_exponent
    given = {
        name: value.double() + (wanted.after[name].double() - got[name].double()) / rate
        for name, value in wanted.used.items()
    }
    return given, {name: rounding(case, wanted.after[name]) / rate for name in given}


def _within(case: TrainingCase, wanted: StepAnswer, given: Named, slack: Named) -> bool:
    """Whether a gradient is so near the right one that every cause which changes little would seem to fit."""
    room = {name: slack[name] + rounding(case, value) for name, value in wanted.used.items()}
    return all(bool(((given[n] - value.double()).abs() <= room[n]).all()) for n, value in wanted.used.items())


def _explains(case: TrainingCase, value: Named, given: Named, slack: Named, magnitude: Named) -> bool:
    """Whether ``given`` is ``value``; it is no gradient of an earlier step that lacks what was frozen then."""
    return given.keys() <= value.keys() and all(
        bool(((value[name] - given[name]).abs() <= rounding(case, magnitude[name]) + slack[name]).all())
        and bool(value[name].isfinite().all())
        for name in given
    )


def _of_probe(answer: Answer, step: int, given: Named, slack: Named) -> Iterator[Cause]:
    """The instrument shows each sample's weight: relative errors of single ones."""
    case, wanted = answer.case, answer.steps[step]
    places = [sample - step * case.layout.batch_size for sample in wanted.samples]
    read, right = given[INSTRUMENT][places, 0], wanted.released[INSTRUMENT].double()[places, 0]
    near = (read - right).abs() <= slack[INSTRUMENT][places, 0] + rounding(case, right)
    off = torch.where(near | (right == 0), torch.zeros_like(read), read / right - 1).tolist()
    own = chunks(case, step, wanted)[:: case.copies]
    if all(math.isfinite(amount) and amount not in (-1.0, 1.0) for amount in off):
        by_chunk = [chunk for mine in own for chunk in mine]
        yield from singled_out(case, off, wanted.multiplicity, by_chunk, "clip factor")


def _of_vector(
    case: TrainingCase, right: Tensor, wanted: StepAnswer, step: int, rank: int, got: Tensor, noun: str
) -> Iterator[Cause]:
    """Whether ``got`` are right but for single values."""
    mine = right[rows(case, step, wanted)[rank]].double()
    near = (got.double() - mine).abs() <= rounding(case, mine) / 16
    off = torch.where(near | (mine == 0), torch.zeros_like(mine), got.double() / mine - 1).tolist()
    sizes = [len(chunk) for chunk in chunks(case, step, wanted)[rank]]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if all(map(math.isfinite, off)):
        places = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        yield from singled_out(case, off, [1] * len(off), places, noun)


def _still(wanted: StepAnswer, got: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Whether all that is wrong in parameters is that some stood still."""
    wrong = differs(got, wanted.after)
    if wrong and all(bool((got[name] == wanted.before[name]).all()) for name in wrong):
        text = f"{mentions(wrong)} did not move at all"
        if not any(bool((got[name] != value).any()) for name, value in wanted.before.items()):
            text = f"{text}, nor did any other (does the optimizer have them?)"
        yield Cause(DID_NOT_MOVE, text, PATTERN)
