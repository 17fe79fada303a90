"""Selection: of many cases that were drawn the few that are judged, chosen to differ in as much as they can.

Most faults need one or two things at once (Kuhn, Wallace and Gallo 2004, "Software fault interactions and implications
for software testing"), and to draw a case costs a thirtieth of judging it. So pairs of what cases are like are covered
greedily, as in Cohen et al. 1997 ("The AETG system"), each case at the price of what it takes to run. Nothing here
knows a fault, an adapter or a verdict.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.judging import coverage
from fsdpcheck.workload import batches

_MANY: Final = 3
"""Numbers from here on are one kind: three steps and five are alike, one and two are not."""


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """``cases`` in another order: first ``count`` that cover the most pairs of kinds for their price, then the others.

    The same cases in the same order give the same order. Of equally good ones the first comes first. Among the first
    is a case of each number of ranks that was drawn, as far as ``count`` allows: large worlds are dear, and would be
    left out. What was drawn once more comes last: it must not stand for a case that was not judged yet.
    """
    distinct = list(dict.fromkeys(cases))
    again = list((Counter(cases) - Counter(distinct)).elements())
    return [*_spread(distinct, count), *again]


def _spread(cases: Sequence[Case], count: int) -> list[Case]:
    masks, left, covered = _masks(cases), list(range(len(cases))), 0
    order: list[int] = []

    def take(among: Sequence[int]) -> None:
        nonlocal covered
        best = max(among, key=lambda one: ((masks[one] & ~covered).bit_count() / price(cases[one]), -one))
        left.remove(best)
        order.append(best)
        covered |= masks[best]

    for free in range(min(count, len(cases)), 0, -1):
        missing = {cases[one].world_size for one in left} - {cases[one].world_size for one in order}
        take([one for one in left if cases[one].world_size in missing] if len(missing) >= free else left)
    return [cases[one] for one in (*order, *left)]


def price(case: Case) -> int:
    """About what it takes to run a case, in no unit: it grows with ranks, batches and layers."""
    if not isinstance(case, TrainingCase):
        return 1
    return (3 + case.world_size) * (2 + case.step.steps * case.step.micro_batches) * (2 + len(case.model.layers))


def kinds(case: Case) -> frozenset[str]:
    """What a case is like: its traits and labels, fields that are words, or numbers up to three; where samples lie."""
    return frozenset((*case.requires(), *coverage.facts(case), *_fields("", case), *_filled(case)))


def _filled(case: Case) -> Iterator[str]:
    """How many ranks have samples, how many micro-batches of one rank, and how many a micro-batch: many are empty."""
    if isinstance(case, TrainingCase):
        ranks = [[len(each) for each in own if each] for own in batches.indices(case, 0)]
        yield from _fields("ranks with samples", sum(map(bool, ranks)))
        yield from _fields("micro-batches with samples", max(map(len, ranks)))
        yield from _fields("samples of a micro-batch", max(itertools.chain([0], *ranks)))


def _fields(name: str, value: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            if one.name != "seed":
                yield from _fields(f"{name}.{one.name}", getattr(value, one.name))
    elif isinstance(value, tuple):
        yield f"{name}: {min(len(value), _MANY)} entries"
        for entry in value if value and dataclasses.is_dataclass(value[0]) else ():
            yield from _fields(name, entry)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value >= _MANY:
        yield f"{name}: many"
    else:
        yield f"{name}: {value}"


def _masks(cases: Sequence[Case]) -> list[int]:
    """The pairs of kinds that each case has, a bit for each."""
    found = [kinds(case) for case in cases]
    numbers = {kind: number for number, kind in enumerate(sorted(frozenset[str]().union(*found)))}
    masks = []
    for own in found:
        single = sum(1 << numbers[kind] for kind in own)
        masks.append(sum(single << numbers[kind] * len(numbers) for kind in own))
    return masks
