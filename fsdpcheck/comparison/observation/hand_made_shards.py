"""Parameters that a script splits by hand, without DTensor: which part a rank has, by what it begins with.

A rank's plain tensor says nothing of a whole. On one rank the script has the whole, and a part begins as a slice of it.
Zeros behind its end are padding, which makes parts of ranks equally long, and belong to nothing that is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fsdpcheck.comparison.record import Key, Piece, RankRecord
from fsdpcheck.execution.matching import ranks_text

_FIRST = "initial parameter"


@dataclass
class HandMade:
    """``ranks``: the records, in which parts that were found have places. ``found``: by name, the dimension along which
    it is split. ``unknown``: by name, why it is not known which parts ranks have."""

    ranks: tuple[RankRecord, ...]
    found: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """What a rank has of a parameter: where along ``dim`` it may begin, and how many such parts make the whole."""

    dim: int
    size: int
    begins: tuple[int, ...]
    parts: int


def placed(ranks: Sequence[RankRecord], alone: Mapping[Key, Tensor]) -> HandMade:
    """Records of W ranks, where ``alone`` are the whole tensors of one rank.

    Of tensors whose values leave several places, for they begin with equal values, ranks have the part that they have
    of others which are split in as many.
    """
    wholes = {key.name: value for key, value in alone.items() if key.kind == _FIRST}
    parts: dict[str, dict[int, _Part | None]] = {}
    for rank, record in enumerate(ranks):
        for key, piece in record.pieces.items():
            whole = wholes.get(key.name)
            if key.kind == _FIRST and whole is not None and piece.places is None and piece.shape != whole.shape:
                parts.setdefault(key.name, {})[rank] = _part(piece, whole)
    usual = _usual(parts)
    made, begins = HandMade(tuple(ranks)), dict[str, dict[int, tuple[_Part, int]]]()
    for name, of_ranks in parts.items():
        begins[name] = {rank: found for rank, part in of_ranks.items() if (found := _begin(rank, part, usual))}
        missing = sorted(of_ranks.keys() - begins[name].keys())
        if missing:
            made.unknown[name] = _why(missing, [of_ranks[rank] for rank in missing])
        else:
            made.found[name] = next(iter(begins[name].values()))[0].dim
    made.ranks = tuple(
        _with_places(record, rank, {name: begins[name][rank] for name in made.found if rank in begins[name]}, wholes)
        for rank, record in enumerate(ranks)
    )
    return made


def _part(piece: Piece, whole: Tensor) -> _Part | None:
    """None where it is no slice of the whole along one dimension, with or without padding."""
    if piece.partial or len(piece.shape) != whole.ndim:
        return None
    dims = [dim for dim in range(whole.ndim) if piece.shape[dim] != whole.shape[dim]]
    size, length = (piece.shape[dims[0]], whole.shape[dims[0]]) if len(dims) == 1 else (0, 0)
    if not size:
        return None
    values = piece.values.to(torch.float64).reshape(piece.shape)
    places = sorted({*range(0, length + size, size), max(0, length - size)})
    begins = tuple(begin for begin in places if _begins(values, whole, dims[0], begin))
    return _Part(dims[0], size, begins, -(-length // size)) if begins else None


def _begins(values: Tensor, whole: Tensor, dim: int, begin: int) -> bool:
    """Whether ``values`` are the whole from ``begin`` on, and zeros behind its end."""
    there = min(values.shape[dim], max(0, whole.shape[dim] - begin))
    same = torch.equal(whole.narrow(dim, min(begin, whole.shape[dim]), there), values.narrow(dim, 0, there))
    return same and not bool(values.narrow(dim, there, values.shape[dim] - there).any())


def _usual(parts: Mapping[str, Mapping[int, _Part | None]]) -> dict[tuple[int, int], set[int]]:
    """By rank and number of parts, which part the rank has of the parameters that leave no choice."""
    found: dict[tuple[int, int], set[int]] = {}
    for of_ranks in parts.values():
        for rank, part in of_ranks.items():
            if part is not None and len(part.begins) == 1:
                found.setdefault((rank, part.parts), set()).add(-(-part.begins[0] // part.size))
    return found


def _begin(rank: int, part: _Part | None, usual: Mapping[tuple[int, int], set[int]]) -> tuple[_Part, int] | None:
    """A part and where it begins; None where that is not known."""
    if part is None:
        return None
    known = usual.get((rank, part.parts), set())
    begins = [begin for begin in part.begins if len(part.begins) == 1 or known == {-(-begin // part.size)}]
    return (part, begins[0]) if len(begins) == 1 else None


def _why(ranks: Sequence[int], parts: Sequence[_Part | None]) -> str:
    if None in parts:
        return f"what {ranks_text(ranks)} begins with is no slice of what one rank alone begins with"
    return f"it begins with equal values: which part of it is on {ranks_text(ranks)} is not known"


def _with_places(
    record: RankRecord, rank: int, begins: Mapping[str, tuple[_Part, int]], wholes: Mapping[str, Tensor]
) -> RankRecord:
    """Each tensor of the shape of a part has the places of that part."""
    pieces = dict(record.pieces)
    for key, piece in record.pieces.items():
        part, begin = begins.get(key.name, (None, 0))
        if part is None or piece.places is not None:
            continue
        whole = wholes[key.name]
        shape = [part.size if dim == part.dim else length for dim, length in enumerate(whole.shape)]
        if list(piece.shape) == shape:
            there = min(part.size, max(0, whole.shape[part.dim] - begin))
            first = min(begin, whole.shape[part.dim])
            places = torch.arange(whole.numel()).reshape(whole.shape).narrow(part.dim, first, there).reshape(-1)
            values = piece.values.reshape(shape).narrow(part.dim, 0, there).reshape(-1)
            pieces[key] = Piece(tuple(whole.shape), values, places)
    return replace(record, pieces=pieces)
