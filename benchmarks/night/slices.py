"""A slice of a night: one command, what is expected of it, and how its end is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

LONGEST: Final = 600.0
"""Processor seconds of a slice. Only an item that takes longer by itself makes a longer one."""
FOLDER: Final = "{folder}"
"""In a command: the folder of its own that a slice may write to."""


@dataclass(frozen=True)
class Outcome:
    """What a slice found. ``seconds``: what its items took, where it says so item by item; ``judged``:
    cases of items, where they tell."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    cases: int = 0
    findings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    judged: Mapping[str, int] = field(default_factory=dict)


Reader = Callable[[Path, str, "Slice"], Outcome]
"""(folder, output, slice) -> outcome. What does not follow from the folder or the output is no pass."""


def by_its_code(folder: Path, output: str, asked: Slice) -> Outcome:
    """One pass; that the command ended with 0 is asked of every slice."""
    return Outcome(passed=1)


@dataclass(frozen=True)
class Slice:
    """One command of a part of the night; it is done when each of its ``items`` is in the record."""

    part: str
    items: tuple[str, ...]
    command: tuple[str, ...]
    seconds: float
    """Processor seconds that are expected."""
    read: Reader = by_its_code
    seed: int | None = None
    tree: str = ""
    """Digest of the content that it is about."""

    @property
    def name(self) -> str:
        """For people: its first item, and how many more."""
        more = f" and {len(self.items) - 1} more" if len(self.items) > 1 else ""
        return f"{self.part}: {self.items[0]}{more}"

    @property
    def too_long(self) -> bool:
        """Whether a single item is expected to take longer than a slice may."""
        return self.seconds > LONGEST


@dataclass(frozen=True)
class Part:
    """Slices of one kind. ``folders``: what their outcome depends on; ``slices(measured, seed)`` cuts them.

    Parts of one ``kind``, which is the name up to a slash, are requested and reported together.
    ``measured``: item -> seconds, of earlier nights.
    """

    name: str
    what: str
    folders: tuple[str, ...]
    slices: Callable[[Mapping[str, float], int], Iterable[Slice]]

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def packed(items: Iterable[str], seconds: Callable[[str], float], longest: float = LONGEST) -> Iterator[list[str]]:
    """Items in their order, in packs that are expected to take at most ``longest``; one that takes longer is alone."""
    pack: list[str] = []
    spent = 0.0
    for item in items:
        if pack and spent + seconds(item) > longest:
            yield pack
            pack, spent = [], 0.0
        pack.append(item)
        spent += seconds(item)
    if pack:
        yield pack


def shard_of(slices: Sequence[Slice], shard: tuple[int, int]) -> Sequence[Slice]:
    """Each n-th slice from the k-th on."""
    return slices[shard[0] - 1 :: shard[1]]
