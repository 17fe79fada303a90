"""Collective and Trace: what a rank asked of its process groups, in order, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's call. Two ranks match when their ``fingerprint`` is equal at the same (group, sequence).

    A message is two calls, "send" and "recv", that agree in the dtype and number of elements at the same sequence of
    (group name, source, destination, tag).
    """

    op: str
    """Canonical name: "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", ..."""
    group: tuple[int, ...]
    """Global ranks of the group by their rank in it: ascending, unless the group was made in another order.

    Of a message: source and destination; of "recv_anysource", until a source is found, all ranks of the group.
    """
    group_name: str
    sequence: int
    """0-based number of this call among this rank's calls on this group; messages are counted by themselves."""
    reduce_op: str = ""
    root: int = -1
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(dtype, shape) of each input tensor."""
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    asynchronous: bool = False
    subject: str = ""
    """Whose data travels, when the call stack tells: a canonical module or unit name; "" when unknown."""
    tag: int | None = None
    """Of a message; None for a collective."""
    about: str = field(default="", compare=False)
    """The parameter that travels, or the gradient of which, when that is known though nobody announced it."""
    phase: str = field(default="", compare=False)
    """Where in a step: "forward of Net.fc", "backward", "step"; "" when unknown."""
    where: str = field(default="", compare=False)
    """file:line of the caller, innermost outside torch and fsdpcheck; "" when unknown."""
    called_at: str = field(default="", compare=False)
    """Where the function of that line was called, as file:line, likewise; "" where nothing else called it."""

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """What must agree between members. ``asynchronous`` may differ; ``subject`` is compared separately."""
        return (self.op, self.reduce_op, self.root, self.inputs, self.outputs)

    def __str__(self) -> str:
        arguments = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.inputs or self._received())
        extra = "".join(
            [f" {self.reduce_op}" if self.reduce_op else "", f" root={self.root}" if self.root >= 0 else ""]
        )
        whose = self.subject or self.about
        of = "".join([f" of {whose}" if whose else "", f" in {self.phase}" if self.phase else ""])
        if self.tag is not None:
            return f"{self.op}({arguments}){of} #{self.sequence} {self._way()}, tag {self.tag}"
        return f"{self.op}({arguments}){extra}{of} #{self.sequence} on ranks {_folded(self.group)}"

    def _received(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return self.outputs if self.tag is not None else ()

    def _way(self) -> str:
        if self.op == "recv_anysource":
            return f"from any of ranks {_folded(self.group)}"
        return f"from rank {self.group[0]} to rank {self.group[1]}"


def _folded(ranks: tuple[int, ...]) -> str:
    """Ranks in full when they are few, else an unbroken run by its ends."""
    if len(ranks) > _SHOWN and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return str(list(ranks))


Trace = tuple[Collective, ...]
"""One rank's collectives in program order."""

Times = Sequence[Sequence[int]]
"""Of each call of a rank (when it was issued, when the rank began to wait for it, when it went on), as far as it came.

Numbers count the events of all ranks in the order in which they happened; no clock is read.
"""
