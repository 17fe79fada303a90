"""Neighbouring cases: their batches differ in one record, which one of them lacks, or which is exchanged.

A batch is a list of indices for each rank, and neighbours are the same lists with one entry removed, added or pointed
at another record, or with all k entries of one record removed. They are never drawn anew: what is proved of a step is
conditional on its lists, and what a sampler may add to privacy is no part of it. "Add" and "remove" are one relation
read from both sides; which side is the first case depends on the seed.

Source: Dwork, Roth 2014, section 2.3 (neighbouring data sets); Abadi et al. 2016, arXiv:1607.00133.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import TrainingCase, prng
from fsdpcheck.errors import NotApplicable
from fsdpcheck.strategies import metamorphic

Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Neighbours:
    """Two cases that differ by ``words``; clipped to C each, their sums are at most ``times`` * C apart.

    ``moved``: the records, by their place in the batch, that occur in one more often than in the other. ``relation``:
    of which kind the difference is.
    """

    first: TrainingCase
    second: TrainingCase
    times: int
    moved: frozenset[int]
    words: str
    relation: str = ""


def of(case: TrainingCase, features: Features) -> Neighbours:
    """Neighbours made from the batch of the case's first step, both accepted by the implementation.

    The first of the relations, in an order that depends on the seed, that gives such a pair. Raises NotApplicable
    where none does.
    """
    listed = metamorphic.listed(case)
    for place in prng.permutation(case.seed, "neighbours", len(_RELATIONS)):
        relation, found = _RELATIONS[place]
        for one, other, times, words in found(listed, listed.layout.lists):
            pair = [replace(listed, layout=replace(listed.layout, lists=lists)) for lists in (one, other)]
            if not all(map(features.takes, pair)):
                continue
            moved = frozenset(record for record, _ in _counts(one) ^ _counts(other))
            first, second = pair if case.seed % 2 else pair[::-1]
            return Neighbours(first, second, times, moved, words, relation)
    raise NotApplicable("no neighbour of this case is accepted by the adapter")


_Found = Iterator[tuple[Lists, Lists, int, str]]
"""(lists, other lists, how many clip norms they may be apart, what was done)."""


def _removed(case: TrainingCase, lists: Lists) -> _Found:
    """One entry removed, on any rank."""
    for rank, place in _places(case, lists):
        yield lists, _with(lists, rank, place, ()), 1, f"record {lists[rank][place]} removed from rank {rank}"


def _replaced(case: TrainingCase, lists: Lists) -> _Found:
    """One entry pointed at a record that is in no list, because it was taken out of both cases before, or at any."""
    for rank, place in _places(case, lists):
        own = lists[rank][place]
        for to in range(case.layout.batch_size):
            if to != own:
                without = tuple(tuple(i for i in each if i != to) for each in lists)
                free = without if len(without[rank]) > 0 and own in without[rank] else lists
                at = free[rank].index(own)
                yield free, _with(free, rank, at, (to,)), 2, f"record {own} of rank {rank} replaced by {to}"
                yield lists, _with(lists, rank, place, (to,)), 2, f"record {own} of rank {rank} replaced by {to}"


def _withdrawn(case: TrainingCase, lists: Lists) -> _Found:
    """All k entries of one record removed: of one that occurs several times, or of one that is made to occur twice."""
    counts = Counter(i for own in lists for i in own)
    for rank, place in _places(case, lists):
        record = lists[rank][place]
        doubled = lists if counts[record] > 1 else _with(lists, rank, place, (record, record))
        times = max(counts[record], 2)
        without = tuple(tuple(i for i in own if i != record) for own in doubled)
        yield doubled, without, times, f"all {times} entries of record {record} removed"


_RELATIONS: Final = (
    ("one entry removed or added", _removed),
    ("one entry replaced", _replaced),
    ("all entries of a record removed or added", _withdrawn),
)


def _places(case: TrainingCase, lists: Lists) -> list[tuple[int, int]]:
    """(rank, place) of every entry, in an order that depends on the seed."""
    every = [(rank, place) for rank, own in enumerate(lists) for place in range(len(own))]
    return [every[k] for k in prng.permutation(case.seed, "entries", len(every))]


def _with(lists: Lists, rank: int, place: int, entries: tuple[int, ...]) -> Lists:
    """``lists`` with ``entries`` in the place of one."""
    own = lists[rank]
    return (*lists[:rank], own[:place] + entries + own[place + 1 :], *lists[rank + 1 :])


def _counts(lists: Lists) -> set[tuple[int, int]]:
    """(record, how often it occurs)."""
    return set(Counter(i for own in lists for i in own).items())
