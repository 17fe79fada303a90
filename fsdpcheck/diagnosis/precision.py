"""Causes in precision: the gradient of some units passes through a type with fewer bits.

Legend: W ranks, N the normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import bits, contributions, shards
from fsdpcheck.diagnosis.cause_fit import chunks, rows
from fsdpcheck.findings.cause import OF_UPDATES, Cause
from fsdpcheck.oracle import Answer, Named

Explains = Callable[[Named], bool]


def rounded(answer: Answer, step: int, explains: Explains) -> Iterator[Cause]:
    """Causes by which the gradient of each unit is the right one, or the right one with fewer bits.

    ``explains``: whether gradients (float64) of some parameters are those got.
    """
    case, wanted = answer.case, answer.steps[step]
    right = {name: wanted.released[name].double() for name in wanted.used}
    wrong = {unit: names for unit, names in shards.units(case, list(right)).items()
             if not explains({name: right[name] for name in names})}  # fmt: skip
    for words, given in _stages(answer, step) if wrong else ():
        for count in bits.TYPES:
            value = given(count)
            if all(explains({name: value[name] for name in names}) for names in wrong.values()):
                text = f"gradients of {', '.join(wrong)} are {bits.words(count)}, {words}"
                yield Cause(f"rounded to {count} bits {words}", text)


def updated(case: TrainingCase, after: Named, got: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Causes by which parameters are right up to one rounding; ``after``: the right ones that are trained."""
    wrong = [name for name, value in after.items() if bool((got[name] != value).any())]
    for count in bits.TYPES:
        if wrong and all(torch.equal(bits.rounded(after[name], count), got[name]) for name in wrong):
            where = ", ".join(shards.units(case, wrong))
            yield Cause(
                f"{OF_UPDATES}parameters of {count} bits",
                f"parameters of {where} are {bits.words(count)}, when updated",
            )


def _stages(answer: Answer, step: int) -> Iterator[tuple[str, Callable[[int], Named]]]:
    """(when, bits -> the gradient of all parameters if they are rounded then)."""
    case, wanted = answer.case, answer.steps[step]
    reduced, everyone = "when they are reduced", chunks(case, step, wanted)
    yield reduced, partial(_sum, [{name: value.double() for name, value in wanted.released.items()}])
    if case.copies > 1:
        return
    world, several = float(case.world_size), case.step.micro_batches > 1
    whole = [[own] for own in rows(case, step, wanted)]
    if several:
        yield "as micro-batches are added up", partial(_accumulated, case, step, answer)
        together = [[row for mine in everyone for row in mine[number]] for number in range(case.step.micro_batches)]
        yield reduced, partial(_sum, [_of(answer, step, own, 1.0) for own in together])
    if case.world_size == 1:
        return
    for batches in (whole, everyone) if several else (whole,):
        yield reduced, partial(_added, case, [[_of(answer, step, own, world) for own in mine] for mine in batches])


def _accumulated(case: TrainingCase, step: int, answer: Answer, count: int) -> Named:
    """Each rank's micro-batches added up one after another, every sum rounded; exact over the ranks."""
    found = []
    for mine in chunks(case, step, answer.steps[step]):
        total, *others = (_of(answer, step, own, float(case.world_size)) for own in mine)
        for other in others:
            total = {name: bits.rounded(value + other[name], count) for name, value in total.items()}
        found.append(total)
    return {name: torch.stack([each[name] for each in found]).sum(0) / case.world_size for name in found[0]}


def _of(answer: Answer, step: int, own: list[int], scale: float) -> Named:
    """Released gradient of these rows alone, times ``scale``."""
    return contributions.weighted(answer.steps[step].gradients, contributions.of_rows(answer, step, own) * scale)


def _sum(parts: Sequence[Named], count: int) -> Named:
    """Each part rounded, then added up exactly."""
    return {name: torch.stack([bits.rounded(part[name], count) for part in parts]).sum(0) for name in parts[0]}


def _added(case: TrainingCase, local: Sequence[Sequence[Named]], count: int) -> Named:
    """Averages over the shards, terms and sums rounded, rank after rank; exact over replicas and micro-batches.

    ``local``: gradients by rank and reduction.
    """
    size, found = case.mesh.dp_shard, []
    for first in range(0, len(local), size):
        for number in range(len(local[0])):
            terms = [own[number] for own in local[first : first + size]]
            total, *others = ({name: bits.rounded(value, count) for name, value in term.items()} for term in terms)
            for other in others:
                total = {name: bits.rounded(value + other[name], count) for name, value in total.items()}
            found.append({name: bits.rounded(value / size, count) for name, value in total.items()})
    replicas = case.mesh.dp_replicate
    return {name: torch.stack([each[name] for each in found]).sum(0) / replicas for name in found[0]}
