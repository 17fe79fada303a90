"""What one rank has done so far, by objects of its own; at its end it becomes a RankRecord, by names."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from fsdpcheck.comparison.observation.parameter_names import ParameterNames, Subject
from fsdpcheck.comparison.precision import exactness
from fsdpcheck.comparison.record import Key, MicroBatch, Piece, RankRecord, Seat
from fsdpcheck.execution.pieces import NotPlaced, Pieces
from fsdpcheck.simulation.scheduler import where


class Moment(NamedTuple):
    """When something was seen: after how many collectives of the rank, at which line of the script, and whether all
    that the rank had computed was exact."""

    calls: int
    line: str
    exact: bool


class _Slot(NamedTuple):
    step: int
    kind: str
    about: tuple[int, int] | str
    optimizer: int


@dataclass
class Batch:
    """What an outermost forward of ``root`` was given."""

    root: nn.Module
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    elements: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, name: str, elements: tuple[int, int]) -> None:
        """More numbers of an input, or "" of the labels."""
        count, total = self.elements.get(name, (0, 0))
        self.elements[name] = count + elements[0], (total + elements[1]) % 2**64

    def named(self, prefix: str) -> MicroBatch:
        """With ``prefix`` before the names of its inputs."""
        rows = {prefix + name: rows for name, rows in self.rows.items()}
        elements = {prefix + name if name else "": number for name, number in self.elements.items()}
        return MicroBatch(rows, tuple(self.labels), elements)


class RankLog:
    """Kept by everything that observes a rank. ``calls``: how many collectives the rank has issued so far."""

    def __init__(self, calls: Callable[[], int]) -> None:
        self._calls = calls
        self.pieces, self.names = Pieces(), ParameterNames()
        self.steps: list[int] = []
        self.batches: dict[int, list[Batch]] = {}
        self.notes: Counter[str] = Counter()
        self.seats: dict[tuple[int, int], Seat] = {}
        self._kept: dict[_Slot, tuple[Piece, Moment]] = {}
        self._numbers: Counter[tuple[int, str]] = Counter()
        self._parts: dict[tuple[int, int, nn.Module, str], Piece] = {}

    @property
    def step(self) -> int:
        """Of the rank: as many as the optimizer has completed that has taken most."""
        return max(self.steps, default=0)

    def now(self) -> Moment:
        held = exactness.here()
        return Moment(self._calls(), line(), held is not None and not held.ended)

    def note(self, text: str) -> None:
        """Report something that is not judged, with the line of the script."""
        there = line()
        self.notes[f"{text}, at {there}" if there else text] += 1

    def keep(self, kind: str, step: int, subject: Subject, tensor: Tensor, moment: Moment, optimizer: int) -> None:
        """Keep this rank's piece of a parameter's value, gradient or state."""
        take = self.pieces
        try:
            piece = take.of(tensor) if subject.part is None else take.of_part(tensor, subject.part)
        except NotPlaced as unknown:
            self.note(f"the {kind} of a parameter of shape {tuple(subject.parameter.shape)} is not compared: {unknown}")
            return
        self.keep_piece(kind, step, subject, piece, moment, optimizer)

    def keep_piece(
        self, kind: str, step: int, subject: Subject, piece: Piece | None, moment: Moment, optimizer: int
    ) -> None:
        if piece is not None:
            self._kept[_Slot(step, kind, subject.key, optimizer)] = piece, moment

    def keep_named(self, kind: str, name: str, piece: Piece | None, moment: Moment) -> None:
        """Keep a piece of what has a name of its own."""
        if piece is not None:
            self._kept[_Slot(self.step, kind, name, 0)] = piece, moment

    def keep_numbered(self, kind: str, tensor: Tensor, moment: Moment) -> None:
        """Keep a loss or a norm, the next of this step."""
        number = self._numbers[self.step, kind]
        self._numbers[self.step, kind] += 1
        try:
            self.keep_named(kind, str(number), self.pieces.of(tensor), moment)
        except NotPlaced as unknown:
            self.note(f"{kind} {number} of step {self.step} is not compared: {unknown}")

    def keep_part(self, backward: int, step: int, module: nn.Module, name: str, gradient: Tensor) -> None:
        """Keep what a backward, of this number in the step, gives as the gradient of a module's parameter."""
        try:
            piece = self.pieces.of(gradient)
        except NotPlaced:
            return
        if piece is not None:
            self._parts[backward, step, module, name] = piece

    def record(self) -> RankRecord:
        """All of it by names."""
        self.names.look()
        names, prefixes = self.names.names(), self.names.roots()
        found = RankRecord(steps=list(self.steps), notes=dict(self.notes))
        for slot, (piece, moment) in self._kept.items():
            name = slot.about if isinstance(slot.about, str) else names.get(slot.about, "?")
            key = Key(slot.step, slot.kind, name)
            if key in found.pieces:
                key = key._replace(name=f"{name} (optimizer {slot.optimizer})")
            found.pieces[key], found.calls[key], found.lines[key] = piece, moment.calls, moment.line
            if moment.exact and not piece.partial:
                found.exact.add(key)
        paths = self.names.paths()
        for (backward, step, module, name), piece in self._parts.items():
            found.pieces[Key(step, f"part {backward}", paths.get(module, "?") + name)] = piece
        found.seats = {names.get(about, "?"): seat for about, seat in self.seats.items()}
        for step, batches in self.batches.items():
            found.batches[step] = [batch.named(prefixes.get(batch.root, "")) for batch in batches]
        return found


def line() -> str:
    """The innermost line of a program that this thread is at, as "file.py:12"; "" where there is none."""
    there = where(sys._getframe(1))
    return Path(there).name if there else ""
