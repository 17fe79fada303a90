"""What must be equal exactly between W ranks and one, and needs no numbers: steps, data, labels, replicas, options.

A fact that differs names its cause. Of what comes after its step no number is judged.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fsdpcheck.comparison.observation.checkpoints import READ
from fsdpcheck.comparison.observation.whole import Assembled
from fsdpcheck.comparison.record import Key, MicroBatch, Observation, RankRecord, order

_SHOWN: Final = 4
_MODULUS: Final = 2**64


@dataclass(frozen=True)
class Fact:
    """Something exact that differs. ``step``: the first. ``kind``: what differs. ``text``: a sentence that says how."""

    step: int
    kind: str
    text: str
    key: Key | None = None


def first(facts: Iterable[Fact]) -> Fact | None:
    """That of the first step; of one step, the one that causes the others."""
    return min(facts, key=lambda fact: (fact.step, _CAUSES.index(fact.kind)), default=None)


GIVEN: Final = ("data", "labels", "pairs")
"""Kinds of facts about what ranks are given. Ranks may rightly be given parts of rows, so numbers must confirm them."""
_CAUSES: Final = ("steps", "data", "labels", "pairs", "option", "replicas", "parts", "checkpoint")


def differing(base: Observation, base_whole: Assembled, run: Observation, whole: Assembled) -> list[Fact]:
    """Every fact in which ``run`` is not what ``base``, of fewer ranks, is."""
    return [
        *_steps(base, run),
        *_batches(base, run),
        *_options(base_whole, run, whole),
        *_replicas(run, whole),
        *_files(whole),
        *(Fact(key.step, "parts", f"{key}: {why}", key) for key, why in whole.gaps.items()),
    ]


def _steps(base: Observation, run: Observation) -> Iterator[Fact]:
    """Of ranks that make different numbers of steps it is not known at which they part: this comes before all else."""
    wanted = next(tuple(record.steps) for record in base.ranks)
    stepping = [record.steps for record in run.ranks if record.steps]
    if len({tuple(steps) for steps in stepping}) > 1 and len(stepping) == len(run.ranks):
        told = "; ".join(f"rank {rank} {_counted(steps)}" for rank, steps in list(enumerate(stepping))[:_SHOWN])
        yield Fact(0, "steps", f"ranks do not step equally often: {told}; {_ranks(base)} makes {_counted(wanted)}")
        return
    for rank, record in enumerate(run.ranks):
        got = tuple(record.steps)
        if got == wanted or (not got and len(run.ranks) > 1 and not record.pieces):
            continue
        fewer = [min(pair) for pair in itertools.zip_longest(got, wanted, fillvalue=0) if len(set(pair)) > 1]
        yield Fact(
            min(fewer), "steps", f"rank {rank} makes {_counted(got)}, where {_ranks(base)} makes {_counted(wanted)}"
        )
        return


def _counted(steps: Sequence[int]) -> str:
    if len(steps) > 1:
        return f"{', '.join(map(str, steps))} steps of its {len(steps)} optimizers"
    return f"{steps[0]} step{'s' * (steps[0] != 1)}" if steps else "no step"


def _batches(base: Observation, run: Observation) -> Iterator[Fact]:
    steps = sorted({step for record in (*base.ranks, *run.ranks) for step in record.batches})
    for kind, what, rows in _ROWS:
        for step in steps:
            wanted, got = (_together(there.ranks, step, rows) for there in (base, run))
            if not _one_factor(wanted, got) and not _same_numbers(base, run, step, kind):
                yield Fact(step, kind, _of_data(what, step, base, run, rows))
                break


def _inputs(batch: MicroBatch) -> Iterable[object]:
    """Rows of all inputs of a micro-batch, those of one number together."""
    names = [name for name, rows in batch.rows.items() if rows]
    many = max((len(batch.rows[name]) for name in names), default=0)
    alike = [name for name in sorted(names) if len(batch.rows[name]) == many]
    return list(zip(*(batch.rows[name] for name in alike), strict=True))


def _labels(batch: MicroBatch) -> Iterable[object]:
    return batch.labels


def _pairs(batch: MicroBatch) -> Iterable[object]:
    inputs = list(_inputs(batch))
    return list(zip(inputs, batch.labels, strict=True)) if len(inputs) == len(batch.labels) else []


_Rows = Callable[[MicroBatch], Iterable[object]]
_ROWS: Final[tuple[tuple[str, str, _Rows], ...]] = (
    ("data", "input rows", _inputs),
    ("labels", "labels", _labels),
    ("pairs", "pairs of an input row and its label", _pairs),
)


def _together(ranks: Sequence[RankRecord], step: int, rows: _Rows) -> Counter[object]:
    return Counter(row for record in ranks for batch in record.batches.get(step, ()) for row in rows(batch))


def _one_factor(one: Counter[object], other: Counter[object]) -> bool:
    """Whether both hold the same rows, each of the one as often as of the other up to one factor for all."""
    return set(one) == set(other) and len({other[row] / one[row] for row in one}) <= 1


def _same_numbers(base: Observation, run: Observation, step: int, kind: str) -> bool:
    """Whether rows are split, along a sequence say, and the numbers in them are the same all together."""
    wanted, got = (_numbers(there.ranks, step, labels=kind == "labels") for there in (base, run))
    if kind == "pairs" or set(wanted) != set(got) or not wanted:
        return False
    factors = {got[name][0] / wanted[name][0] for name in wanted if wanted[name][0]}
    if len(factors) != 1 or not (factor := factors.pop()).is_integer():
        return False
    return all((wanted[name][1] * int(factor) - got[name][1]) % _MODULUS == 0 for name in wanted)


def _numbers(ranks: Sequence[RankRecord], step: int, *, labels: bool) -> dict[str, tuple[int, int]]:
    """By the name of an input how many numbers it has on all ranks, and the sum of their hashes."""
    found: dict[str, tuple[int, int]] = {}
    for record in ranks:
        for batch in record.batches.get(step, ()):
            for name, (many, hashed) in batch.elements.items():
                if (name == "") is labels:
                    so_far = found.get(name, (0, 0))
                    found[name] = so_far[0] + many, so_far[1] + hashed
    return found


def _of_data(what: str, step: int, base: Observation, run: Observation, rows: _Rows) -> str:
    wanted, got = (_together(there.ranks, step, rows) for there in (base, run))
    if not got or not wanted:
        none, some = (run, base) if not got else (base, run)
        return f"{_ranks(none)} are given no {what} at step {step}, {_ranks(some)} {sum((got or wanted).values())}"
    foreign, missing = set(got) - set(wanted), set(wanted) - set(got)
    lines = [f"{what} at step {step} are not those of {_ranks(base)}"]
    if sum(got.values()) * base.world_size == sum(wanted.values()) * run.world_size:
        has = "has" if base.world_size == 1 else "have"
        there = f"{sum(got.values())} where {_ranks(base)} {has} {sum(wanted.values())}"
        lines.append(
            f"{there}: a rank takes as many on each number; to keep the batch, divide it in the script's arguments,"
            " as in --batch-size {16//W}"
        )
    if foreign:
        whose = {
            rank: sum(row in foreign for batch in record.batches.get(step, ()) for row in rows(batch))
            for rank, record in enumerate(run.ranks)
        }
        told = ", ".join(f"{many} of rank {rank}" for rank, many in list(whose.items())[:_SHOWN] if many)
        lines.append(
            f"{sum(whose.values())} of {sum(got.values())} are others ({told}){_elsewhere(foreign, base, rows)}"
        )
    if missing:
        lines.append(f"{len(missing)} of {_ranks(base)} are left out")
    if not foreign and not missing:
        most = max(wanted, key=lambda row: got[row] / wanted[row])
        lines.append(f"some come {got[most]} times, where one rank has them {wanted[most]} times")
    return "; ".join(lines)


def _elsewhere(rows: set[object], base: Observation, of: _Rows) -> str:
    """Whether rows that come at the wrong step come at another."""
    where = {
        step
        for record in base.ranks
        for step, batches in record.batches.items()
        for batch in batches
        for row in of(batch)
        if row in rows
    }
    meet = "meets" if base.world_size == 1 else "meet"
    if not where:
        return f", which {_ranks(base)} never {meet}"
    return f", which {_ranks(base)} {meet} at step {', '.join(map(str, sorted(where)[:_SHOWN]))}"


def _options(base_whole: Assembled, run: Observation, whole: Assembled) -> Iterator[Fact]:
    for key, value in base_whole.values.items():
        if not key.kind.startswith("option "):
            continue
        for rank, record in enumerate(run.ranks):
            piece = record.pieces.get(key)
            if piece is None or torch.equal(piece.values.reshape(-1), value.reshape(-1)):
                continue
            got, wanted = (tensor.reshape(-1).tolist() for tensor in (piece.values, value))
            said = (
                f"{key.kind.removeprefix('option ')} of {key.name} is {_plain(got)} on rank {rank} at step {key.step}"
            )
            yield Fact(key.step, "option", f"{said}, where one rank has {_plain(wanted)}", key)
            return


def _replicas(run: Observation, whole: Assembled) -> Iterator[Fact]:
    for key in sorted((key for key in whole.replicas if not key.kind.startswith("option ")), key=order):
        found = whole.replicas[key]
        text = f"ranks {found.one} and {found.other} hold replicas of {key} that differ by {found.greatest:.3g}"
        yield Fact(key.step, "replicas", text, key)
        return


def _files(whole: Assembled) -> Iterator[Fact]:
    """Of distributed checkpoints, what one process reads from the files beside what ranks held when they saved."""
    for key in sorted((key for key in whole.values if key.name.endswith(READ)), key=order):
        held, found = whole.values.get(key._replace(name=key.name.removesuffix(READ))), whole.values[key]
        if held is None or (held.shape == found.shape and torch.equal(held, found)):
            continue
        if held.shape != found.shape:
            how = f"shape {list(found.shape)}, where ranks hold {list(held.shape)}"
        else:
            wrong = ~((held == found) | (held.isnan() & found.isnan()))
            how = f"{int(wrong.sum())} of {found.numel()} entries that are not those that ranks hold"
            if not wrong.any():
                continue
        yield Fact(key.step, "checkpoint", f"{key.name.removesuffix(READ)} is read from its files with {how}", key)
        return


def _plain(values: list[float]) -> str:
    return str(values[0]) if len(values) == 1 else str(values)


def _ranks(observation: Observation) -> str:
    size = observation.world_size
    return "one rank" if size == 1 else f"{size} ranks"
