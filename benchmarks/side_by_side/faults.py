"""All faults by name: ``--install benchmarks.side_by_side.faults:NAME`` plants one, wherever Opacus or torch is."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

from benchmarks.side_by_side import faults_fully_shard, faults_opacus
from tests.mechanisms.planting import Mechanism

SIDES = (faults_opacus.found, faults_fully_shard.found)
"""Whose source is altered: Opacus, and torch's ``fully_shard``."""
_IN_TURN = zip_longest(*(side.mechanisms.items() for side in SIDES))
ALL: dict[str, Mechanism] = dict(pair for pair in chain.from_iterable(_IN_TURN) if pair is not None)
"""One of each side in turn, which is the order in which they are judged."""


def __getattr__(name: str) -> Any:
    if name in ALL:
        return ALL[name]
    raise AttributeError(f"there is no fault {name!r}, there are {', '.join(ALL)}")
