"""Causes that give each sample's gradient another weight in the released one.

Legend: n samples of a step, W ranks, R replicas, K micro-batches, B samples of the logical batch, N the normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import clip_factors, joint_clipping
from fsdpcheck.diagnosis.cause_fit import ADDED_UP, by_ratio, chunks, whole_numbers
from fsdpcheck.diagnosis.contributions import of_each, pick
from fsdpcheck.findings.cause import Cause
from fsdpcheck.findings.roots import OF_NORMS
from fsdpcheck.oracle import Answer, StepAnswer

TIMES: Final = "the gradient is exactly {} times the right one"
Weighing = Callable[[list[int], Tensor], Tensor]
"""(rows of one micro-batch of one rank, their factors) -> their weights, before division by N."""


def candidates(answer: Answer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, weights [n]) of the released gradient: sum of weight * per-sample gradient."""
    case, wanted = answer.case, answer.steps[step]
    counts = torch.tensor(wanted.multiplicity, dtype=torch.float64)
    plain = counts / case.step.normaliser
    right = wanted.factors.double() * plain
    for cause, ratio in by_ratio(case, step, "ratio", TIMES, ADDED_UP):
        yield cause, right * ratio
    for key, whole in whole_numbers(case.step.normaliser):
        text = f"the normaliser is taken for a whole number: {whole} in place of N = {case.step.normaliser}"
        yield Cause(f"N {key}", text), right * (case.step.normaliser / whole)
    yield from _by_place(case, wanted, step)
    if case.step.private and case.step.clipping != "unclipped":
        for cause, of_chunk in joint_clipping.factors(answer, step):
            yield cause, _total(case, wanted, step, partial(_of_chunk, of_chunk))
    if case.step.private:
        yield from _clipping(answer, wanted, step, plain)
    yield from _shares(case, wanted, step, right)


def _clipping(answer: Answer, wanted: StepAnswer, step: int, plain: Tensor) -> Iterator[tuple[Cause, Tensor]]:
    right = wanted.factors.double() * plain
    yield Cause("not clipped", "the gradient is not clipped at all"), plain
    leak = Cause("leak", "the unclipped gradient leaked into the clipped one: their sum")
    yield leak, right + plain
    yield leak, right + plain * answer.case.step.normaliser / answer.case.shares  # by a backward without any scale
    square = Cause("factor squared", "samples are clipped twice: weighed by the square of their clip factor")
    yield square, wanted.factors.double() * right
    for cause, found in clip_factors.of_few_bits(wanted.factors):
        yield cause, found.double() * plain
    for cause, found in clip_factors.candidates_everywhere(answer, step):
        if cause.key != "factor squared" and not torch.equal(found, torch.ones_like(found)):  # said above
            yield Cause(f"factors: {cause.key}", OF_NORMS + cause.text), found.double() * plain


def _of_chunk(factors_of: Callable[[list[int]], Tensor], own: list[int], _: Tensor) -> Tensor:
    return factors_of(own).double()


def _by_place(case: TrainingCase, wanted: StepAnswer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """Causes in the place of a sample in its micro-batch."""

    def total(weigh: Weighing) -> Tensor:
        return _total(case, wanted, step, weigh)

    for said, factor in (("left out", 0.0), ("counted twice", 2.0)):
        cause = Cause(f"first {said}", f"the first sample of each micro-batch is {said}")
        yield cause, total(lambda _, found, by=factor: torch.cat([found[:1] * by, found[1:]]))  # type: ignore[misc]
    odd = Cause("odd last left out", "the last sample of each micro-batch of 3, 5, ... samples is left out")
    yield odd, total(lambda _, found: found * (torch.arange(len(found)) < len(found) - _odd(found)))
    if not case.step.private:
        return
    swapped = Cause("first two exchanged", "the clip factors of the first two samples of a micro-batch are exchanged")
    yield swapped, total(lambda _, found: torch.cat([found[:2].flip(0), found[2:]]))


def _odd(found: Tensor) -> int:
    """1 if there are 3, 5, ... of them, else 0."""
    return len(found) % 2 if len(found) > 1 else 0


def _total(case: TrainingCase, wanted: StepAnswer, step: int, weigh: Weighing) -> Tensor:
    """Weights [n] when each micro-batch weighs its samples by ``weigh``."""
    weights = torch.zeros(len(wanted.samples), dtype=torch.float64)
    for mine in chunks(case, step, wanted)[:: case.copies]:
        for chunk in mine:
            if chunk:
                weights.index_add_(0, torch.tensor(chunk), weigh(chunk, wanted.factors[chunk].double()))
    return weights / case.step.normaliser


def _shares(case: TrainingCase, wanted: StepAnswer, step: int, right: Tensor) -> Iterator[tuple[Cause, Tensor]]:
    """Whole micro-batches, ranks, or their sizes gone wrong."""
    once, everyone = of_each(case, wanted), chunks(case, step, wanted)
    apart = everyone[:: case.copies]
    if case.step.unequal:
        again = [row for place, mine in enumerate(apart) if case.has_fewer(place * case.copies) for row in mine[-2]]
        text = "ranks with fewer micro-batches than others take their last again"
        yield Cause("last again", text), right + pick(once, again)
    yield from _means(case, apart, once)
    yield from of_ranks(case, everyone, once, case.copies)
    if len(apart) > 1:
        yield from _duplicates(case, wanted, apart, once)


def of_ranks(
    case: TrainingCase, everyone: list[list[list[int]]], once: Tensor, copies: int = 1
) -> Iterator[tuple[Cause, Tensor]]:
    """Micro-batches or ranks that count alone, or again. ``everyone``: rows by rank and micro-batch, of which so many
    ranks after each other have ``copies``; ``once``: what each row weighs.
    """
    apart, count = everyone[::copies], case.step.micro_batches
    if count > 1:
        for which, number in (("first", 0), ("last", count - 1)):
            text = f"only the {which} micro-batch counts, of {count}"
            weights = pick(once, [row for mine in apart for row in mine[number]])
            yield Cause(f"only the {which} micro-batch", text), weights
        again = [row for mine in apart for number, own in enumerate(mine) for row in own * (count - number)]
        text = "a micro-batch's local gradients are not cleared when they are reduced: later reductions add them again"
        yield Cause("micro-batches again", text), pick(once, again)
    if len(apart) == 1:
        return
    by_rank = [[row for own in mine for row in own] for mine in everyone]
    for rank, mine in enumerate(by_rank):
        alone, only = pick(once, mine), f"only the samples of rank {rank} count"
        yield Cause("one rank", f"{only}: not reduced over the ranks"), alone
        yield Cause(f"W times rank {rank}", f"{only}: W times them"), alone * len(by_rank)
    replicas, shards = case.mesh.dp_replicate, case.mesh.dp_shard
    for replica in range(replicas if replicas > 1 else 0):
        mine = [row for own in by_rank[replica * shards : (replica + 1) * shards] for row in own]
        text = f"only the samples of replica {replica} count: gradients are not reduced over the replicas"
        yield Cause("one replica", text), pick(once, mine)
        yield Cause("R times one replica", text), pick(once, mine) * replicas


def _means(case: TrainingCase, everyone: list[list[list[int]]], once: Tensor) -> Iterator[tuple[Cause, Tensor]]:
    means, micro = torch.zeros_like(once), torch.zeros_like(once)
    share = case.step.normaliser / len(everyone)
    for mine in everyone:
        size = sum(map(len, mine))
        for chunk in mine:
            means += pick(once, chunk) * share / max(size, 1)
            micro += pick(once, chunk) * share / max(len(chunk), 1)
    text = "local means are averaged although the ranks hold different numbers of samples"
    yield Cause("local means", text), means
    if case.step.micro_batches > 1:
        yield Cause("local means", "local means of micro-batches are averaged, whatever their sizes"), micro


def _duplicates(
    case: TrainingCase, wanted: StepAnswer, everyone: list[list[list[int]]], once: Tensor
) -> Iterator[tuple[Cause, Tensor]]:
    """Samples that a sampler gave to two ranks, by wrapping around."""
    if max(wanted.multiplicity, default=0) < 2:
        return
    same = torch.zeros_like(once)
    for number in range(case.step.micro_batches):
        same += pick(once, sorted({row for mine in everyone for row in mine[number]}))
    text = "wrap-around duplicates are dropped: a sample that two ranks have counts once"
    yield Cause("duplicates once", text), once.clone()
    yield Cause("duplicates once", f"{text} in a micro-batch"), same
