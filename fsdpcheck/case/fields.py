"""Fields of a case, each by itself: words that are known, and numbers in their ranges."""

from __future__ import annotations

import typing
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from fsdpcheck.case.refusal import refuse

if TYPE_CHECKING:
    from fsdpcheck.case.training import MeshSpec

MAX_WORLD_SIZE = 64
Range = tuple[str, float, float, float]
"""(field, value, lowest, highest)"""


def require_words(parts: Iterable[tuple[str, object]]) -> None:
    """Raises InvalidCase for a word in the fields of ``parts``, by name, that none of them knows.

    It would choose some branch in silence.
    """
    for where, part in parts:
        for name, words in _words(cast(Hashable, type(part))):
            if getattr(part, name) not in words:
                refuse(f"{where}.{name}", getattr(part, name), f"one of {', '.join(words)}", "choose one of them")


def require_ranges(ranges: Iterable[Range]) -> None:
    """Raises InvalidCase for a number outside of its range."""
    for where, value, low, high in ranges:
        if not low <= value <= high:
            refuse(where, value, f"a number from {low} to {high}", "choose one in the range")


def of_mesh(mesh: MeshSpec) -> Iterator[Range]:
    """The numbers of a mesh."""
    yield "mesh.dp_shard", mesh.dp_shard, 1, MAX_WORLD_SIZE
    yield "mesh.dp_replicate", mesh.dp_replicate, 1, MAX_WORLD_SIZE
    yield from ((f"mesh.axes {axis}", size, 2, MAX_WORLD_SIZE) for axis, size in mesh.axes)
    yield "mesh.goes_on_at", mesh.goes_on_at, 0, MAX_WORLD_SIZE
    yield "the world size, the product of the mesh's axes", mesh.world_size, 1, MAX_WORLD_SIZE


def of_seed(seed: int) -> Range:
    return "seed", seed, 0, (1 << 64) - 1


@cache
def _words(kind: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(field, its words) of every field of a dataclass whose type is a Literal."""
    hints = typing.get_type_hints(kind).items()
    return tuple((name, typing.get_args(hint)) for name, hint in hints if typing.get_origin(hint) is typing.Literal)
