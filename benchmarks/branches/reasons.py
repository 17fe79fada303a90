"""Why no law reaches a branch: refusals, and what ``reasons.toml`` says function by function.

A reason says how many branches it is of. One that is of another number is stale: there may be a new branch that nobody
has thought about.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.branches.union import Branch

FILE: Final = Path(__file__).parent / "reasons.toml"


@dataclass(frozen=True)
class Reason:
    """Of ``branches`` branches of ``where``, "file::function". ``tests``: the file of tests that take them."""

    where: str
    branches: int
    why: str
    tests: str = ""


@dataclass(frozen=True)
class Sorted:
    """All branches, by what is known of them; ``stale``: reasons of branches that are taken by now, or not there."""

    taken: frozenset[Branch]
    refusals: frozenset[Branch]
    reasoned: frozenset[Branch]
    left: frozenset[Branch]
    stale: tuple[str, ...]


def read(file: Path = FILE) -> tuple[Reason, ...]:
    """The reasons of the file. Raises TypeError for a key that no reason has."""
    return tuple(Reason(**row) for row in tomllib.loads(file.read_text(encoding="utf-8"))["reason"])


def sorted_out(every: Iterable[Branch], taken: set[Branch], known: Iterable[Reason] | None = None) -> Sorted:
    """What is known of each branch. A refusal is an error that the implementation raises; honest cases meet none."""
    untaken = set(every) - taken
    refusals = {one for one in untaken if one.refuses}
    reasoned: set[Branch] = set()
    stale = []
    for reason in read() if known is None else known:
        own = {one for one in untaken - refusals if f"{one.file}::{one.function}" == reason.where}
        if len(own) == reason.branches:
            reasoned |= own
        else:
            stale.append(f"{reason.where}: of {reason.branches} branches, {len(own)} are not taken")
    left = untaken - refusals - reasoned
    return Sorted(*map(frozenset, (taken, refusals, reasoned, left)), tuple(stale))
