"""Collective and Trace: what a rank asked of its process groups, in order, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's call. Two ranks match when their ``fingerprint`` is equal at the same (group, sequence)."""

    op: str
    """Canonical name: "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", ..."""
    group: tuple[int, ...]
    """Global ranks of the group by their rank in it: ascending, unless the group was made in another order."""
    group_name: str
    sequence: int
    """0-based number of this call among this rank's calls on this group."""
    reduce_op: str = ""
    root: int = -1
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(dtype, shape) of each input tensor."""
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    asynchronous: bool = False
    subject: str = ""
    """Whose data travels, when the call stack tells: a canonical module or unit name; "" when unknown."""

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """What must agree between members. ``asynchronous`` may differ; ``subject`` is compared separately."""
        return (self.op, self.reduce_op, self.root, self.inputs, self.outputs)

    def __str__(self) -> str:
        arguments = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.inputs)
        extra = "".join(
            [f" {self.reduce_op}" if self.reduce_op else "", f" root={self.root}" if self.root >= 0 else ""]
        )
        of = f" of {self.subject}" if self.subject else ""
        return f"{self.op}({arguments}){extra}{of} #{self.sequence} on ranks {_folded(self.group)}"


def _folded(ranks: tuple[int, ...]) -> str:
    """Ranks in full when they are few, else an unbroken run by its ends."""
    if len(ranks) > _SHOWN and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return str(list(ranks))


Trace = tuple[Collective, ...]
"""One rank's collectives in program order."""
