"""A whole tensor put together of the pieces that ranks have of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fsdpcheck.execution.matching import ranks_text
from fsdpcheck.execution.pieces import Piece, Shown


class Difference(NamedTuple):
    """Two ranks that hold the same place and not the same value. ``greatest``: of all places of the two, inf where one
    is not finite. ``place``: the first such place, as indices of the whole."""

    one: int
    other: int
    greatest: float
    place: tuple[int, ...]


class Whole(NamedTuple):
    """What pieces give together. ``values``: float64, of the whole's shape; None where ``gap`` says why there are none.
    ``difference``: of two ranks that hold the same places and not the same values."""

    values: Tensor | None
    difference: Difference | None = None
    gap: str = ""


def whole(pieces: Mapping[int, Piece]) -> Whole:
    """The tensor of which ranks have these pieces."""
    if wrong := _unlike(pieces):
        return Whole(None, gap=wrong)
    some = next(iter(pieces.values()))
    parts = {rank: (_flat(piece), piece.places) for rank, piece in _distinct(pieces).items()}
    if some.partial:
        replicas, gap = _reduced(pieces)
        if gap:
            return Whole(None, gap=gap)
        parts = dict(replicas)
    values, seen, difference = _filled(some.shape, parts)
    missing = int((~seen).sum())
    if not missing:
        return Whole(values.reshape(some.shape), difference)
    place = _indices(int((~seen).nonzero()[0, 0]), some.shape)
    text = f"{missing} of {len(seen)} values are on no rank, the first at {list(place)}; {_have(pieces)} the others"
    return Whole(None, difference, text)


class NotWhole(Exception):
    """Ranks have shown pieces that make no whole; the text says of what, and why."""


Named = MutableMapping[str, Any]
"""Tensors by name, or ``Shown`` in their place."""


def make_whole(ranks: Sequence[Named | None], what: str) -> None:
    """Put the tensors in the place of which ranks show pieces, for each rank that of its own companions.

    What is owned is given to the companions too that show nothing of it.
    Raises NotWhole, before anything is changed, where a companion shows no piece, where a place is on no rank, and
    where two ranks that hold one place have not the same value of it.
    """
    made: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for rank, named in enumerate(ranks):
        for name, value in (named or {}).items():
            if isinstance(value, Shown) and (name, value.ranks) not in made:
                made[name, value.ranks] = _together(ranks, rank, name, value, what)
    for named in ranks:
        for name, value in list((named or {}).items()):
            if named is not None and isinstance(value, Shown):
                named[name] = made[name, value.ranks]
    for (name, companions), value in made.items():
        for other in companions:
            if (named := ranks[other]) is not None:
                named.setdefault(name, value)


def _together(ranks: Sequence[Named | None], rank: int, name: str, value: Shown, what: str) -> Tensor:
    pieces: dict[int, Piece] = {}
    for other in value.ranks:
        found = (ranks[other] or {}).get(name)
        if found is None and value.owners is not None and other not in value.owners:
            continue
        if not isinstance(found, Shown) or found.ranks != value.ranks:
            has = "no piece" if found is None else "no piece of the same whole"
            raise NotWhole(f"{what} {name}: rank {rank} shows a piece of what {ranks_text(value.ranks)} have together,"
                           f" and rank {other} shows {has}")  # fmt: skip
        pieces[other] = found.piece
    found_whole = whole(pieces)
    if found_whole.values is None:
        raise NotWhole(f"{what} {name}: {found_whole.gap}")
    if (differs := found_whole.difference) is not None:
        raise NotWhole(f"{what} {name}: ranks {differs.one} and {differs.other} both hold place {list(differs.place)},"
                       f" and their values differ")  # fmt: skip
    return found_whole.values.to(value.dtype)


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
