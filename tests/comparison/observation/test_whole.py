"""Pieces that do not make one whole are told, by place and rank; those that do are put together."""

from __future__ import annotations

import pickle

import pytest
import torch

from fsdpcheck.comparison.observation.whole import Assembled, assembled
from fsdpcheck.comparison.record import Key, Observation, Piece, RankRecord, share_pieces
from fsdpcheck.execution.whole import Difference

KEY = Key(0, "gradient", "w")
NAN, INF = float("nan"), float("inf")


def _whole(*pieces: Piece | None, key: Key = KEY) -> Assembled:
    records = tuple(RankRecord({} if piece is None else {key: piece}) for piece in pieces)
    return assembled(Observation(len(pieces), records, ()))


def _piece(
    values: list[float], places: list[int] | None = None, shape: tuple[int, ...] = (4,), **more: object
) -> Piece:
    there = None if places is None else torch.tensor(places, dtype=torch.int64)
    return Piece(shape, torch.tensor(values, dtype=torch.float64), there, **more)  # type: ignore[arg-type]


def test_parts_at_their_places() -> None:
    found = _whole(_piece([3, 1], [2, 0], (2, 2)), _piece([2, 4], [1, 3], (2, 2)))
    assert found == Assembled(found.values)
    assert torch.equal(found.values[KEY], torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64))


def test_a_wrong_place_is_a_gap_and_a_difference() -> None:
    found = _whole(_piece([1, 2], [0, 1]), _piece([3, 4], [1, 2]))
    assert KEY not in found.values
    assert found.gaps == {KEY: "1 of 4 values are on no rank, the first at [3]; ranks 0, 1 have the others"}
    assert found.replicas == {KEY: Difference(0, 1, 1.0, (1,))}


def test_a_rank_without_its_part_leaves_a_gap() -> None:
    found = _whole(None, _piece([1, 2], [2, 3], (2, 2)))
    assert found.gaps == {KEY: "2 of 4 values are on no rank, the first at [0, 0]; rank 1 has the others"}


def test_ranks_may_have_nothing() -> None:
    found = _whole(_piece([1, 2, 3, 4]), None, _piece([], [], (4,)))
    assert (found.gaps, found.replicas, list(found.values)) == ({}, {}, [KEY])


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ([1, NAN, -INF, 0], None),
        ([1, NAN, -INF, -0.0], None),
        ([1, NAN, -INF, 0.5], Difference(0, 2, 0.5, (1, 1))),
        ([1, 2, -INF, 0], Difference(0, 2, INF, (0, 1))),
        ([1, NAN, INF, 0], Difference(0, 2, INF, (1, 0))),
        ([1 + 2**-52, NAN, -INF, 0], Difference(0, 2, 2**-52, (0, 0))),
    ],
)
def test_replicas_are_equal_to_the_last_bit(other: list[float], difference: Difference | None) -> None:
    first = _piece([1, NAN, -INF, 0], shape=(2, 2))
    found = _whole(first, _piece([1, NAN, -INF, 0], shape=(2, 2)), _piece(other, shape=(2, 2)))
    assert found.replicas == ({} if difference is None else {KEY: difference})
    parts = _whole(first, _piece([1, NAN], [0, 1], (2, 2)), _piece(other, [0, 1, 2, 3], (2, 2)))
    assert parts.replicas == found.replicas


@pytest.mark.parametrize(
    ("partial", "wanted"),
    [("sum", [1.0, 7]), ("avg", [0.5, 3.5]), ("max", [4.0, 4]), ("min", [-3.0, 3]), ("norm 2.0", [5.0, 5])],
)
def test_partial_pieces_are_reduced_within_each_replica(partial: str, wanted: list[float]) -> None:
    def part(values: list[float], replica: int) -> Piece:
        return _piece(values, shape=(2,), partial=partial, parts=2, replica=(replica,))

    found = _whole(part([-3, 3], 0), part([4, 4], 0), part([-3, 3], 1), part([4, 4], 1))
    assert (found.values[KEY].tolist(), found.replicas, found.gaps) == (wanted, {}, {})
    differs = _whole(part([-3, 3], 0), part([4, 4], 0), part([-3, 3.5], 1), part([4, 5], 1))
    assert (differs.replicas[KEY].one, differs.replicas[KEY].other, differs.replicas[KEY].place) == (0, 2, (1,))


def test_a_part_of_a_sum_that_is_missing_is_told() -> None:
    found = _whole(_piece([1, 2], shape=(2,), partial="sum", parts=2), None)
    assert found.gaps == {KEY: "rank 0 has parts to be put together by sum, and 1 of 2 parts of a value were seen"}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (_piece([1, 2], shape=(2,)), "rank 0 has part of a tensor of shape (4,), rank 1 of shape (2,)"),
        (
            _piece([1, 2, 3, 4], partial="sum", parts=2),
            "ranks 0 and 1 are to be put together in different ways, 'whole' and 'sum'",
        ),
    ],
)
def test_pieces_of_different_tensors_are_told(other: Piece, told: str) -> None:
    found = _whole(_piece([1, 2, 3, 4]), other)
    assert (found.gaps, found.values) == ({KEY: told}, {})


def test_losses_stay_apart() -> None:
    loss = Key(0, "loss", "0")
    found = _whole(_piece([1], shape=()), _piece([2], shape=()), key=loss)
    assert {rank: value.tolist() for rank, value in found.by_rank[loss].items()} == {0: [1.0], 1: [2.0]}
    assert not found.values


def test_equal_pieces_are_shared_and_stay_so_in_a_pickle() -> None:
    one, other = (RankRecord({KEY: _piece([1, 2, 3, 4]), KEY._replace(step=1): _piece([rank])}) for rank in (0, 1))
    share_pieces(other, one)
    assert other.pieces[KEY] is one.pieces[KEY]
    assert other.pieces[KEY._replace(step=1)] is not one.pieces[KEY._replace(step=1)]
    one, other = pickle.loads(pickle.dumps((one, other)))
    assert other.pieces[KEY] is one.pieces[KEY]
    assert one.pieces[KEY].equals(_piece([1, 2, 3, 4]))


@pytest.mark.parametrize(
    "other",
    [
        _piece([1, 2], [0, 2]),
        _piece([1, 3], [0, 1]),
        _piece([1, 2], [0, 1], shape=(5,)),
        _piece([1, 2], [0, 1], partial="sum"),
        _piece([1, 2]),
    ],
)
def test_other_pieces_are_not_equal(other: Piece) -> None:
    assert not _piece([1, 2], [0, 1]).equals(other)
