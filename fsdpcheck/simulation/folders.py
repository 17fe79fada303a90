"""Folders that several ranks use, and files to which several append: told where nothing fixes which comes first.

Which of two such uses comes first is not searched. Two depend on each other if one makes the folder, or an entry of it,
and the other asks for it or lists it; two that make the same one, unless both allow that it exists; and what several
ranks append to one file, if it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Literal

from fsdpcheck.simulation.decisions import Decisions

Kind = Literal["make", "make if absent", "look", "list", "enter", "append"]
_DEPEND: Final = {
    frozenset(pair)
    for pair in (
        ("make", "make"),
        ("make", "make if absent"),
        ("make", "look"),
        ("make if absent", "look"),
        ("enter", "list"),
        ("append", "append"),
        ("append", "look"),
    )
}
_STANDARD: Final = ("os.py", "pathlib.py", "genericpath.py", "<frozen os>", "<frozen genericpath>")


@dataclass(slots=True)
class Folders:
    """The folders that ranks of one run have used, by path: who did what, and when, in steps of the run."""

    _uses: dict[str, dict[tuple[int, Kind], int]] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return path in self._uses

    def use(self, path: str, rank: int, kind: Kind, heard: Decisions) -> bool:
        """A rank uses one; whether that depends on a use by another rank that did not have to come before."""
        known, uses = heard.known_to(rank), self._uses.setdefault(path, {})
        races = any(
            other != rank and frozenset((kind, what)) in _DEPEND and known.get(other, 0) < at
            for (other, what), at in uses.items()
        )
        uses[rank, kind] = heard.tick(rank)
        return races


def allows_that_it_exists(frame: FrameType | None) -> bool:
    """Whether a folder is made by os.makedirs or Path.mkdir with exist_ok."""
    return any(inner.f_locals.get("exist_ok") is True for inner in _of_python(frame))


def _of_python(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code.co_filename.endswith(_STANDARD):
        yield frame
        frame = frame.f_back
