"""Parameters that a script has divided among ranks by hand: plain tensors, each a part of what one rank has.

Nothing says so. But at the beginning a part equals, bit for bit, some slice of the parameter of one rank, and where
there is only one such slice, it is known where the part lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fsdpcheck.comparison.record import Key, Observation, Piece, RankRecord

_BEGINNING = "initial parameter"


def located(observation: Observation, whole: Mapping[Key, Tensor]) -> Observation:
    """The same, with the places of parts that lie in one slice of a parameter of ``whole``, those of the base.

    What has the shape of the base's, or lies in no slice or in several, is left as it is.
    """
    return replace(observation, ranks=tuple(_placed(record, whole) for record in observation.ranks))


def _placed(record: RankRecord, whole: Mapping[Key, Tensor]) -> RankRecord:
    places: dict[str, tuple[tuple[int, ...], Tensor, tuple[int, ...]]] = {}
    for key, piece in record.pieces.items():
        base = whole.get(key)
        if key.kind == _BEGINNING and base is not None and _is_part(piece, base):
            found = list(_slices(piece, base))
            if len(found) == 1:
                places[key.name] = piece.shape, found[0], tuple(base.shape)
    if not places:
        return record
    return replace(record, pieces={key: _put(piece, places.get(key.name)) for key, piece in record.pieces.items()})


def _is_part(piece: Piece, base: Tensor) -> bool:
    """Whether it is a plain tensor that is smaller than the base's in one dimension alone."""
    if piece.places is not None or piece.partial or len(piece.shape) != base.ndim:
        return False
    smaller = [one for one, other in zip(piece.shape, base.shape, strict=True) if one != other]
    return len(smaller) == 1 and 0 < piece.values.numel() < base.numel()


def _slices(piece: Piece, base: Tensor) -> Iterator[Tensor]:
    """Places of the slices of the base that have the values of the piece."""
    (dim,) = [dim for dim, size in enumerate(piece.shape) if size != base.shape[dim]]
    size, values = piece.shape[dim], piece.values.reshape(piece.shape)
    numbers = torch.arange(base.numel()).reshape(base.shape)
    for begin in range(base.shape[dim] - size + 1):
        if torch.equal(base.narrow(dim, begin, size).to(values.dtype), values):
            yield numbers.narrow(dim, begin, size).reshape(-1)


def _put(piece: Piece, place: tuple[tuple[int, ...], Tensor, tuple[int, ...]] | None) -> Piece:
    if place is None or piece.places is not None or piece.partial or piece.shape != place[0]:
        return piece
    return replace(piece, shape=place[2], places=place[1])
