"""What a wrong gradient is made of: weights that are determined are found, and told; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdpcheck.comparison.causes import Cause
from fsdpcheck.comparison.contributions import Part, PartsOfGradients, Weights, causes, of_replicas, weights
from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.record import Key, Observation, Piece, RankRecord

_WITHIN = 1e-12


def _parts(ranks: int, backwards: int = 1, entries: int = 20) -> dict[Part, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        (rank, backward): torch.randn(entries, dtype=torch.float64, generator=draw)
        for rank in range(ranks)
        for backward in range(backwards)
    }


def _found(parts: dict[Part, Tensor], gradient: Tensor) -> Weights | None:
    return weights(parts, gradient, torch.full((len(gradient),), _WITHIN, dtype=torch.float64))


def _sum(parts: dict[Part, Tensor], given: dict[Part, float]) -> Tensor:
    return torch.stack([parts[part] * weight for part, weight in given.items()]).sum(0)


def test_weights_are_those_that_the_gradient_was_made_with() -> None:
    parts = _parts(3, 2)
    given = {part: 0.1 * number for number, part in enumerate(parts)}
    found = _found(parts, _sum(parts, given))
    assert found is not None
    assert all(abs(found.of[part] - weight) <= found.uncertain for part, weight in given.items())


@pytest.mark.parametrize("wrong", ["no sum", "same parts", "too few entries"])
def test_weights_that_are_not_determined_are_not_told(wrong: str) -> None:
    parts = _parts(3, entries=2 if wrong == "too few entries" else 20)
    gradient = _sum(parts, dict.fromkeys(parts, 1.0))
    if wrong == "same parts":
        parts[1, 0] = parts[0, 0].clone()
    if wrong == "no sum":
        gradient = gradient + 1e-9 * torch.arange(20)
    assert _found(parts, gradient) is None


def _told(ranks: int, backwards: int, got: dict[Part, float], wanted: dict[Part, float] | None = None) -> list[Cause]:
    parts = _parts(ranks, backwards)
    wanted = wanted or dict.fromkeys(parts, 1 / ranks)
    return list(causes(_found(parts, _sum(parts, wanted)), _found(parts, _sum(parts, got))))


_ALL4 = {(rank, 0): 0.25 for rank in range(4)}


@pytest.mark.parametrize(
    ("ranks", "backwards", "got", "word", "said"),
    [
        (4, 1, {(2, 0): 1.0}, "one rank", "it is the part of rank 2 alone, of 4"),
        (4, 1, {**_ALL4, (3, 0): 0.0}, "one rank", "the part of rank 3 is missing"),
        (4, 1, {**_ALL4, (1, 0): 0.5}, "one rank", "the part of rank 1 counts 2 times as much as those of the others"),
        (4, 1, {(0, 0): 0.5, (1, 0): 0.5}, "wrong group", "it has the parts of ranks 0, 1 alone, of 4"),
        (4, 1, dict.fromkeys(_ALL4, 1.0), "factor", "each rank's part counts 4 times"),
        (2, 3, {(0, 2): 0.5, (1, 2): 0.5}, "last micro-batch only", "of 3 backwards of each rank only the last counts"),
        (2, 2, {(0, 0): 0.5, (1, 0): 0.5}, "micro-batches", "of each rank backward 1 is missing"),
        (2, 2, {(0, 0): 0.5, (1, 0): 0.5, (1, 1): 0.5}, "micro-batches", "parts are missing: backward 1 of rank 0"),
        (4, 1, {**_ALL4, (3, 0): 0.25 * (1 + 1e-6)}, "one rank", "the part of rank 3 counts 1 + 1e-06 times as m"),
        (2, 1, {(0, 0): 0.7, (1, 0): 0.3}, "weighting", "the ranks' parts weigh 0.7, 0.3; what one rank has is 0.5, 0"),
    ],
)  # fmt: skip
def test_a_wrong_sum_is_named(ranks: int, backwards: int, got: dict[Part, float], word: str, said: str) -> None:
    (cause,) = _told(ranks, backwards, got)
    assert (cause.word, cause.text[: len(said)]) == (word, said)


def test_where_one_rank_has_lost_parts_that_is_said() -> None:
    (cause,) = _told(2, 2, {(0, 1): 0.5, (1, 1): 0.5}, {(1, 1): 1.0})
    assert (cause.word, cause.text.partition(":")[2]) == ("last micro-batch only", " earlier ones are lost")
    (cause,) = _told(2, 2, dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 0.5), {(1, 1): 1.0})
    assert tuple(cause) == ("micro-batches", "one rank's gradient has 1 of the ranks' 4 parts alone")


def test_what_is_no_sum_of_parts_is_said_of_the_side_that_is_none() -> None:
    parts = _parts(2)
    right = _found(parts, parts[0, 0] + parts[1, 0])
    assert [cause.word for cause in causes(None, right)] == ["forward"]
    assert [cause.text for cause in causes(right, None)] == [
        "the ranks' own parts can be added up to what one rank has: what becomes of them is wrong"
    ]
    assert not list(causes(None, None))


@pytest.mark.parametrize(
    ("by_rank", "word", "said"),
    [
        ({0: {(0, 0): 1.0}, 1: {(1, 0): 1.0}}, "not reduced", "each rank has its own part alone: nothing reduces them"),
        (
            {rank: {(other, 0): 0.5 for other in ((0, 1) if rank < 2 else (2, 3))} for rank in range(4)},
            "wrong group",
            "each is reduced over some ranks: those of ranks 0, 1 of ranks 0, 1; ranks 2, 3 of ranks 2, 3",
        ),
        (
            {
                0: {(0, 0): 0.5, (1, 0): 0.5, (0, 1): 0.5},
                1: {(0, 0): 0.5, (1, 0): 0.5, (1, 1): 0.5},
            },
            "not reduced",
            "each rank has only its own of backward 1, which is not reduced",
        ),
    ],
)
def test_replicas_are_named(by_rank: dict[int, dict[Part, float]], word: str, said: str) -> None:
    parts = _parts(len(by_rank), 2 if word == "not reduced" and len(by_rank[0]) > 1 else 1)
    found = {rank: _found(parts, _sum(parts, given)) for rank, given in by_rank.items()}
    assert [tuple(cause) for cause in of_replicas({rank: one for rank, one in found.items() if one})] == [(word, said)]


def test_parts_come_from_what_ranks_have_recorded_of_the_step() -> None:
    parts, names = _parts(2, entries=8), ("a", "b")
    records = [RankRecord() for _ in range(2)]
    for (rank, backward), values in parts.items():
        for name, half in zip(names, values.split(4), strict=True):
            records[rank].pieces[Key(1, f"part {backward}", name)] = Piece((4,), half)
            records[rank].pieces[Key(0, f"part {backward}", name)] = Piece((4,), half * 7)
    halves = dict(zip(names, (parts[0, 0] * 0.5 + parts[1, 0] * 0.5).split(4), strict=True))
    base = {Key(1, "gradient", name): value for name, value in halves.items()}
    whole = {Key(1, "gradient", name): value for name, value in zip(names, parts[1, 0].split(4), strict=True)}
    wrong = [Decision(key, "differs", 1.0, _WITHIN, 1.0, _WITHIN) for key in base]
    found = PartsOfGradients(Observation(2, tuple(records), ()), base, whole)
    assert [cause.text for cause in found.causes(wrong)] == ["it is the part of rank 1 alone, of 2"]
    shard = Piece((4,), torch.ones(2, dtype=torch.float64), torch.arange(2))
    for name in names:
        records[0].pieces[Key(1, "part 0", name)] = shard
    assert not list(found.causes(wrong))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (0.25, 0.5, []),
        (0.25, 1 / 3, []),
        (3.0, 1.0, []),
        (1 / 37, 4 / 37, []),
        (0.25 * 0.93, 0.25, ["clip norm"]),
        (0.25, 0.25 * 1.01, ["clip norm"]),
    ],
)
def test_a_factor_of_what_was_clipped_is_another_clipping(one: float, other: float, words: list[str]) -> None:
    parts, key = _parts(2), Key(0, "gradient", "w")
    records = [RankRecord() for _ in range(2)]
    for (rank, backward), values in parts.items():
        records[rank].pieces[Key(0, f"part {backward}", "w")] = Piece((20,), values)
    base, whole = ({key: _sum(parts, dict.fromkeys(parts, weight))} for weight in (one, other))
    found = PartsOfGradients(Observation(2, tuple(records), ()), base, whole)
    assert [cause.word for cause in found.clipped([Decision(key, "differs", 1.0, _WITHIN, 1.0, _WITHIN)])] == words


def test_where_parameters_are_wrong_in_several_ways_one_that_is_named_is_told() -> None:
    parts, records = _parts(2, entries=8), [RankRecord() for _ in range(2)]
    names = ("scaled", "missing")
    for (rank, backward), values in parts.items():
        for name, half in zip(names, values.split(4), strict=True):
            records[rank].pieces[Key(0, f"part {backward}", name)] = Piece((4,), half)
    right = dict(zip(names, (parts[0, 0] * 0.5 + parts[1, 0] * 0.5).split(4), strict=True))
    base = {Key(0, "gradient", name): value for name, value in right.items()}
    whole = {
        Key(0, "gradient", "scaled"): right["scaled"] * 1.5,
        Key(0, "gradient", "missing"): parts[0, 0].split(4)[1] * 0.75,
    }
    wrong = [Decision(key, "differs", 1.0, _WITHIN, 1.0, _WITHIN) for key in base]
    found = PartsOfGradients(Observation(2, tuple(records), ()), base, whole)
    assert [tuple(cause) for cause in found.causes(wrong)] == [
        ("one rank", "of missing: it is the part of rank 0 alone, of 2")
    ]
