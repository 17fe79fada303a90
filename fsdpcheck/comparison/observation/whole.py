"""Whole tensors put together of ranks' pieces, after the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.comparison.observation.hand_made_shards import HandMade, placed
from fsdpcheck.comparison.record import Key, Observation, Piece, RankRecord
from fsdpcheck.execution.whole import Difference, Whole, whole

_BY_RANK: Final = ("loss",)
"""Kinds that are each rank's own and no parts of one."""


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
        else:
            _note(found, key, whole(pieces))
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


def _note(found: Assembled, key: Key, made: Whole) -> None:
    if made.difference is not None:
        found.replicas[key] = made.difference
    if made.values is None:
        found.gaps[key] = made.gap
    else:
        found.values[key] = made.values
