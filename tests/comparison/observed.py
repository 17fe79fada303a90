"""Observations by hand: what ranks would have recorded, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fsdpcheck.comparison.record import Key, MicroBatch, Observation, Piece, RankRecord

Values = Mapping[Key, Sequence[float]]


def piece(values: Sequence[float]) -> Piece:
    """A whole tensor of one dimension."""
    return Piece((len(values),), torch.tensor(values, dtype=torch.float64))


def rank(
    values: Values | None = None,
    batches: Mapping[int, Sequence[tuple[str, str]]] | None = None,
    steps: Sequence[int] = (1,),
) -> RankRecord:
    """One rank's record. ``batches``: by step, micro-batches as (rows, labels), a letter each."""
    record = RankRecord(steps=list(steps))
    record.pieces = {key: piece(those) for key, those in (values or {}).items()}
    record.batches = {
        step: [MicroBatch({"x": tuple(rows)}, tuple(labels)) for rows, labels in given]
        for step, given in (batches or {}).items()
    }
    return record


def observation(*ranks: RankRecord) -> Observation:
    """Of so many ranks, without any collective."""
    return Observation(len(ranks), ranks, ((),) * len(ranks))
