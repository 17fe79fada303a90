"""Diagnosis: finds the known mistakes that would have computed what was got. Never part of a verdict.

Each cause says what a known mistake would have computed: one weight per sample (a wrong gradient is a wrongly
weighted sum of per-sample gradients), one vector, or a whole gradient. All that fit are given, with keys that are the
same in every case; judging/attribution.py keeps those that fit every failing case. None instead of a list: the case
cannot tell.

Legend: n samples of a step, b on one rank, W ranks, S shards.
"""

from __future__ import annotations

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
    ratios,
    rounding,
    rows,
    singled_out,
)
from fsdpcheck.diagnosis.collectives import of_failure
from fsdpcheck.diagnosis.global_norm import of_clipped_update, of_grad_norm, unasked
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
    "ratios",
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
    if (explains := conventions.updated(case, wanted.before, step)) is not None:
        found += conventions.undeclared(answer, step, got, explains)
    found += _of_places(case, wanted, got, wanted.after)
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
    found = _of_places(answer.case, wanted, got, wanted.used)
    found += conventions.undeclared(answer, step, got, lambda gradient: {n: gradient[n] for n in wanted.used})
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
    size, world = case.mesh.dp_shard, len(everyone)
    if case.mesh.dp_replicate > 1 and wrong == list(range(size, world)):
        text = "replicas other than the first start from other parameters: those of replica 0 are not broadcast"
        found.append(Cause("replicas apart", text))
    elif size == world > 2 and wrong == list(range(1, world)):
        text = "every rank but rank 0 starts from other parameters: those of rank 0 are not broadcast"
        found.append(Cause("ranks apart", text))
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
    if sorted(right.tolist()) == sorted(got.tolist()):
        return [Cause("another order", "the norms are right but in another order")]
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
    found: list[Cause] = []
    for cause, value in ((None, _averaged(case, terms)), *_of_ranks(case, terms), *reweighed):
        if all(_near(case, got[name], value[name], [own[name] for mine in terms for own in mine]) for name in got):
            if cause is None:
                return None
            found.append(cause)
    return found


def _averaged(case: TrainingCase, terms: Sequence[Sequence[Named]]) -> Named:
    """The right gradient: the average over the ranks of their sums."""
    every = [own for mine in terms for own in mine]
    return {name: torch.stack([own[name].double() for own in every]).sum(0) / case.world_size for name in every[0]}


def _of_ranks(case: TrainingCase, terms: Sequence[Sequence[Named]]) -> Iterator[tuple[Cause, Named]]:
    """(cause, gradient) with ranks or micro-batches weighed wrongly."""
    world, names = case.world_size, list(terms[0][0])
    local = [{name: torch.stack([t[name].double() for t in mine]).sum(0) for name in names} for mine in terms]
    total = {name: torch.stack([own[name] for own in local]).sum(0) / world for name in names}
    for cause, ratio in by_ratio(case, 0, "ratio", "the gradient is exactly {} times the right one", ADDED_UP):
        yield cause, {n: value * ratio for n, value in total.items()}
    if world == 1:
        return
    for rank, own in enumerate(local):
        text = f"only the samples of rank {rank} count: not reduced over the ranks"
        yield Cause("one rank", text), {n: value / world for n, value in own.items()}
        yield Cause("W times one rank", text), own
    count = case.step.micro_batches
    for chunk in (0, count - 1) if count > 1 else ():
        kept = {n: torch.stack([mine[chunk][n].double() for mine in terms]).sum(0) / world for n in names}
        which = "first" if chunk == 0 else "last"
        yield Cause(f"only the {which} micro-batch", f"only the {which} micro-batch counts, of {count}"), kept
    replicas, size = case.mesh.dp_replicate, case.mesh.dp_shard
    for replica in range(replicas if replicas > 1 else 0):
        group = local[replica * size : (replica + 1) * size]
        kept = {n: torch.stack([own[n] for own in group]).sum(0) / size for n in names}
        text = f"only the samples of replica {replica} count: gradients are not reduced over the replicas"
        yield Cause("one replica", text), kept
    yield from _local_shards(case, local, total)


def _local_shards(case: TrainingCase, local: Sequence[Named], total: Named) -> Iterator[tuple[Cause, Named]]:
    if case.mesh.dp_replicate > 1:
        return
    for owner in shards.owners(case, total):
        for unit, names in shards.units(case, list(total)).items():
            own = {n: torch.stack([mine[n] for mine in local]).gather(0, owner[n].unsqueeze(0))[0] for n in names}
            text = f"gradients of {unit} are not reduced over the ranks: each shard has its own rank's only"
            yield Cause(f"not reduced: {unit}", text), {**total, **own}


def _near(case: TrainingCase, got: Tensor, value: Tensor, terms: Sequence[Tensor]) -> bool:
    room = rounding(case, torch.stack([term.abs() for term in terms]).sum(0))
    return bool(((got.double() - value.double()).abs() <= room).all())


def _of_given(answer: Answer, step: int, given: Named, slack: Named) -> Iterator[Cause]:
    """Causes that explain a whole gradient ``given``, up to ``slack``."""
    case, wanted = answer.case, answer.steps[step]
    magnitude = {name: value.abs().sum(0) / case.step.normaliser for name, value in wanted.gradients.items()}
    for cause, share in sample_weights.candidates(answer, step):
        value = {name: torch.tensordot(share, g, dims=1) for name, g in wanted.gradients.items()}
        terms = {name: torch.tensordot(share.abs(), g.abs(), dims=1) for name, g in wanted.gradients.items()}
        if _explains(case, value, given, slack, terms):
            yield cause
    whole = (
        *shards.unreduced(answer, step),
        *stale_state.gradients(answer, step),
        *joint_clipping.clipped(answer, step),
        *tied_uses.gradients(answer, step),
        *unasked(answer, step, given),
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
    """Whether ``got`` are right values of other samples, in another order, or single ones wrong."""
    everyone = rows(case, step, wanted)
    mine = right[everyone[rank]].double()
    near = (got.double() - mine).abs() <= rounding(case, mine) / 16
    off = torch.where(near | (mine == 0), torch.zeros_like(mine), got.double() / mine - 1).tolist()
    sizes = [len(chunk) for chunk in chunks(case, step, wanted)[rank]]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if all(map(math.isfinite, off)):
        places = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        yield from singled_out(case, off, [1] * len(off), places, noun)
    if len(set(right.tolist())) < 2:
        return
    if sorted(mine.tolist()) == sorted(got.tolist()):
        text = "the values are right but permuted: samples are in another order (a missing reorder)"
        yield Cause("permuted", text)
    for other, own in enumerate(everyone):
        if other != rank and len(got) and torch.equal(right[own], got):
            yield Cause("another rank's", f"these are the values of rank {other}'s samples")


def _of_places(case: TrainingCase, wanted: StepAnswer, got: Mapping[str, Tensor], right: Named) -> list[Cause]:
    """A cause read off *where* values differ: parameters that stood still, biases only, the last shard only."""
    wrong, found = differs(got, right), []
    if not wrong:
        return []
    if right is wanted.after and all(bool((got[name] == wanted.before[name]).all()) for name in wrong):
        text = f"{mentions(wrong)} did not move at all"
        if not any(bool((got[name] != value).any()) for name, value in wanted.before.items()):
            text = f"{text}, nor did any other (does the optimizer have them?)"
        found.append(Cause(DID_NOT_MOVE, text, PATTERN))
    if right is not wanted.after and all(not bool(got[name].any()) for name in wrong):
        found.append(Cause("no gradient", f"{mentions(wrong)} got no gradient", PATTERN))
    moving = {name: right[name] != (wanted.before[name] if right is wanted.after else 0) for name in wrong}
    if all(_only_last_shard(got[name] != right[name], moving[name], case.mesh.dp_shard) for name in wrong):
        found.append(Cause("last shard", "only rows of the last, padded shard differ: padding", PATTERN))
    others = [name for name in wanted.used if not name.endswith(".bias")]
    if all(name.endswith(".bias") for name in wrong) and any(bool(wanted.used[name].any()) for name in others):
        found.append(Cause("biases", "only bias parameters differ", PATTERN))
    return found


def _only_last_shard(different: Tensor, moving: Tensor, count: int) -> bool:
    """Whether the shards do not divide the rows, and only rows of the last of several differ, though others move."""
    rows_there = different.shape[0]
    size = -(-rows_there // count)
    first = (rows_there - 1) // size * size
    several = rows_there % count > 0 and first > 0 and bool(moving[:first].any())
    return several and not bool(different[:first].any())
