"""Whole tensors put together of ranks' pieces, after the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fsdpcheck.comparison.observation.hand_made_shards import HandMade, placed
from fsdpcheck.comparison.record import Key, Observation, Piece, RankRecord
from fsdpcheck.execution.matching import ranks_text

_BY_RANK: Final = ("loss",)
"""Kinds that are each rank's own and no parts of one."""


class Difference(NamedTuple):
    """Two ranks that hold the same place and not the same value. ``greatest``: of all places of the two, inf where one
    is not finite. ``place``: the first such place, as indices of the whole."""

    one: int
    other: int
    greatest: float
    place: tuple[int, ...]


@dataclass
class Assembled:
    """What ranks hold together.

    ``values``: whole tensors, float64; a key that only some ranks have is put together of theirs. ``replicas``: of
    each tensor that ranks hold several times the pair that differs most; a zero equals one of the other sign, NaN
    equals NaN. ``gaps``: why a tensor is not whole, in words; it has no value then. ``by_rank``: losses, each rank's.
    """

    values: dict[Key, Tensor] = field(default_factory=dict)
    replicas: dict[Key, Difference] = field(default_factory=dict)
    gaps: dict[Key, str] = field(default_factory=dict)
    by_rank: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    """By name, the dimension along which the script has split a parameter by hand."""


def assembled(observation: Observation, alone: Assembled | None = None) -> Assembled:
    """All that ``observation`` has pieces of, whole.

    ``alone``: the same of one rank. With it, plain tensors of another shape than one rank's are parts that the script
    has made by hand: they have the places that their first values tell, or there is a gap.
    """
    found, ranks = Assembled(), observation.ranks
    made = HandMade(ranks) if alone is None else placed(ranks, alone.values)
    found.split = made.found
    for key, pieces in _by_key(made.ranks).items():
        if key.kind in _BY_RANK:
            found.by_rank[key] = {rank: piece.values.to(torch.float64) for rank, piece in pieces.items()}
        elif key.name in made.unknown and _is_of_the_shape_of_a_part(key, pieces, ranks):
            found.gaps[key] = made.unknown[key.name]
        elif wrong := _unlike(pieces):
            found.gaps[key] = wrong
        else:
            _put_together(found, key, pieces)
    return found


def _is_of_the_shape_of_a_part(key: Key, pieces: Mapping[int, Piece], ranks: Sequence[RankRecord]) -> bool:
    """Whether it is split as its parameter is: not a count of steps, say."""
    for rank, piece in pieces.items():
        mine = ranks[rank].pieces
        shapes = (mine[of].shape for of in mine if of.kind == "initial parameter" and of.name == key.name)
        if piece.shape == next(shapes, None):
            return True
    return False


def _by_key(records: Sequence[RankRecord]) -> dict[Key, dict[int, Piece]]:
    found: dict[Key, dict[int, Piece]] = {}
    for rank, record in enumerate(records):
        for key, piece in record.pieces.items():
            found.setdefault(key, {})[rank] = piece
    return found


def _unlike(pieces: Mapping[int, Piece]) -> str:
    """In words, in what pieces cannot be those of one tensor; "" if they can."""
    (first, piece), *others = pieces.items()
    for rank, other in others:
        if other.shape != piece.shape:
            return f"rank {first} has part of a tensor of shape {piece.shape}, rank {rank} of shape {other.shape}"
        if other.partial != piece.partial:
            ways = " and ".join(repr(one.partial or "whole") for one in (piece, other))
            return f"ranks {first} and {rank} are to be put together in different ways, {ways}"
    return ""


def _put_together(found: Assembled, key: Key, pieces: Mapping[int, Piece]) -> None:
    some = next(iter(pieces.values()))
    parts = {rank: (_flat(piece), piece.places) for rank, piece in _distinct(pieces).items()}
    if some.partial:
        replicas, gap = _reduced(pieces)
        if gap:
            found.gaps[key] = gap
            return
        parts = dict(replicas)
    whole, seen, difference = _filled(some.shape, parts)
    if difference is not None:
        found.replicas[key] = difference
    missing = int((~seen).sum())
    if missing:
        place = _indices(int((~seen).nonzero()[0, 0]), some.shape)
        found.gaps[key] = (
            f"{missing} of {len(seen)} values are on no rank, the first at {list(place)}; {_have(pieces)} the others"
        )
    else:
        found.values[key] = whole.reshape(some.shape)


_Part = tuple[Tensor, Tensor | None]


def _distinct(pieces: Mapping[int, Piece]) -> dict[int, Piece]:
    """Of pieces that ranks share only the first rank's."""
    seen: set[int] = set()
    found = {}
    for rank, piece in pieces.items():
        if id(piece) not in seen:
            seen.add(id(piece))
            found[rank] = piece
    return found


def _flat(piece: Piece) -> Tensor:
    return piece.values.to(torch.float64)


def _filled(shape: tuple[int, ...], parts: Mapping[int, _Part]) -> tuple[Tensor, Tensor, Difference | None]:
    """The flattened whole, which places were given, and the two ranks that differ most in what both gave."""
    size = torch.Size(shape).numel()
    if len(parts) == 1 and (only := next(iter(parts.values())))[1] is None:
        return only[0], torch.ones(size, dtype=torch.bool), None
    whole, owner = torch.zeros(size, dtype=torch.float64), torch.full((size,), -1, dtype=torch.int64)
    worst: Difference | None = None
    for rank, (values, places) in parts.items():
        there = torch.arange(size) if places is None else places
        had = owner[there] >= 0
        if bool(had.any()):
            difference = _difference(rank, values[had], there[had], whole, owner, shape)
            if difference is not None and (worst is None or difference.greatest > worst.greatest):
                worst = difference
        fresh = there[~had]
        whole[fresh], owner[fresh] = values[~had], rank
    return whole, owner >= 0, worst


def _difference(
    rank: int, values: Tensor, there: Tensor, whole: Tensor, owner: Tensor, shape: tuple[int, ...]
) -> Difference | None:
    before = whole[there]
    differs = (values != before) & ~(values.isnan() & before.isnan())
    if not bool(differs.any()):
        return None
    sizes = (values - before).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).where(differs, torch.zeros(()))
    most = int(sizes.argmax())
    return Difference(
        int(owner[there[most]]), rank, float(sizes[most]), _indices(int(there[differs.nonzero()[0, 0]]), shape)
    )


def _reduced(pieces: Mapping[int, Piece]) -> tuple[dict[int, _Part], str]:
    """Partial pieces put together, by the first rank of each replica; or why not, in words."""
    size = torch.Size(next(iter(pieces.values())).shape).numel()
    groups: dict[tuple[int, ...], dict[int, Piece]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(piece.replica, {})[rank] = piece
    found: dict[int, _Part] = {}
    for group in groups.values():
        first = next(iter(group.values()))
        total, counts = torch.full((size,), _NEUTRAL[_way(first)], dtype=torch.float64), torch.zeros(size)
        for piece in group.values():
            there = torch.arange(size) if piece.places is None else piece.places
            counts[there] += 1
            total[there] = _combined(first, total[there], _flat(piece))
        given = counts > 0
        if bool((counts[given] != first.parts).any()):
            return {}, (
                f"{_have(group)} parts to be put together by {first.partial}, "
                f"and {int(counts[given].min())} of {first.parts} parts of a value were seen"
            )
        found[min(group)] = _finished(first, total)[given], given.nonzero()[:, 0]
    return found, ""


def _have(pieces: Mapping[int, Piece]) -> str:
    return f"{ranks_text(pieces)} {'has' if len(pieces) == 1 else 'have'}"


_NEUTRAL: Final = {"sum": 0.0, "avg": 0.0, "norm": 0.0, "max": float("-inf"), "min": float("inf")}


def _way(piece: Piece) -> str:
    return piece.partial.partition(" ")[0]


def _combined(piece: Piece, total: Tensor, values: Tensor) -> Tensor:
    match _way(piece):
        case "max":
            return torch.maximum(total, values)
        case "min":
            return torch.minimum(total, values)
        case "norm":
            return total + values.abs() ** float(piece.partial.split()[1])
    return total + values


def _finished(piece: Piece, total: Tensor) -> Tensor:
    match _way(piece):
        case "avg":
            return total / piece.parts
        case "norm":
            return total ** (1 / float(piece.partial.split()[1]))
    return total


def _indices(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))
