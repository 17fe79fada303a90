"""What was observed of one run of a script, as plain data: pieces of tensors by rank, batches, losses, notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch import Tensor

from fsdpcheck.execution import Failure
from fsdpcheck.execution.pieces import Piece as Piece
from fsdpcheck.execution.trace import Trace

KINDS: Final = {
    "initial parameter": "a parameter just before the first step of its optimizer",
    "loss": "what backward was called on",
    "part": "a rank's own part of a gradient, of one backward; only where a difference is explained",
    "gradient": "a parameter's gradient as its optimizer's step begins",
    "norm": "what a function that clips gradients returned",
    "option": "a number in the optimizer's group of a parameter as the step begins; 'option lr' names it",
    "parameter": "a parameter as its optimizer's step ends",
    "state": "a tensor of the optimizer's state of a parameter as the step ends; 'state exp_avg' names it",
    "checkpoint": "a tensor of a file that the script saved",
    "final parameter": "as the script ends, what a module that no optimizer trains has in place of a trained parameter",
}
"""Kind of observable -> what it is. In the order in which a step makes them."""


class Key(NamedTuple):
    """Which observable: of which step of its optimizer, of which kind, and of which parameter.

    ``step``: how many steps that optimizer has completed, so 0 is the first. ``kind``: one of KINDS, a state or an
    option with its name after it. ``name``: the parameter's, as the unwrapped root module names it; for a loss or a
    norm its number within the step, as text.
    """

    step: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}{' of ' + self.name if self.name else ''} at step {self.step}"


def order(key: Key) -> tuple[int, int, str, str]:
    """The order in which a script makes its observables, for ``sorted``."""
    kind = next(number for number, name in enumerate(KINDS) if key.kind.startswith(name))
    return key.step, kind, key.kind, key.name


@dataclass(frozen=True)
class MicroBatch:
    """What one outermost forward was given, and the labels its loss was.

    ``rows``: by the name of the input ("x", "0" where it has none), one hash for each entry of its first dimension.
    ``labels``: one hash a row of the target that the next loss function was given; () where none was seen.
    ``elements``: by the name of the input, "" for the labels, how many numbers there are, and the sum modulo 2**64 of
    their hashes. Those of parts add up to those of the whole however it is split, along a sequence too.
    """

    rows: dict[str, tuple[str, ...]]
    labels: tuple[str, ...] = ()
    elements: dict[str, tuple[int, int]] = field(default_factory=dict)


class Seat(NamedTuple):
    """Where a rank's optimizers have a parameter. ``optimizer``: its number, in the order of their first steps.

    ``place``: among its parameters. ``offset``: where in the flat one that FSDP1 made the parameter begins.
    ``is_dtensor``: whether the optimizer has a DTensor.
    """

    optimizer: int
    place: int
    offset: int
    is_dtensor: bool


class Choice(NamedTuple):
    """What an operator has chosen of floats: indices, truths or whole numbers, int64, flattened. ``line``: where."""

    operator: str
    line: str
    made: Tensor


@dataclass
class RankRecord:
    """What one rank did. ``steps``: completed steps by optimizer, in the order of their first step.

    ``batches``: by step, micro-batches in their order. ``calls``: by key, how many collectives the rank had issued when
    the observable was seen. ``notes``: what is reported and not judged, a sentence with file:line each, and how often.
    """

    pieces: dict[Key, Piece] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    batches: dict[int, list[MicroBatch]] = field(default_factory=dict)
    calls: dict[Key, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    lines: dict[Key, str] = field(default_factory=dict)
    """By key, the line of the script at which it was seen, as "file.py:12"."""
    seats: dict[str, Seat] = field(default_factory=dict)
    """By the name of a parameter."""
    exact: set[Key] = field(default_factory=set)
    """What was seen while all that the rank had computed was proved exact, and is no part of a sum."""
    ended: str = ""
    """Where that ended: an operator with file:line."""
    choices: list[Choice] = field(default_factory=list)
    """In their order, those of a run in float64."""


@dataclass(frozen=True)
class Observation:
    """What was observed of a script on ``world_size`` ranks. ``failure``: None if every rank came to its end."""

    world_size: int
    ranks: tuple[RankRecord, ...]
    traces: tuple[Trace, ...]
    failure: Failure | None = None
    printed: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)


def share_pieces(record: RankRecord, other: RankRecord) -> None:
    """Have ``record`` keep the pieces of ``other`` where its own equal them, as those of replicas do."""
    for key, piece in record.pieces.items():
        same = other.pieces.get(key)
        if same is not None and same is not piece and piece.equals(same):
            record.pieces[key] = same
