"""A program that shows with torch alone what differs, on processes: the text of witness.py, cut to one case.

It runs the script, unchanged, and looks at one thing that an optimizer has. How far that may lie from what the base has
is no number of ours: half of what was measured on simulated ranks in the script's own precision.
"""

from __future__ import annotations

import inspect
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison import witness
from fsdpcheck.comparison.distances import between
from fsdpcheck.comparison.judge import raised
from fsdpcheck.comparison.kept_runs import Runs
from fsdpcheck.comparison.record import Key, Piece, Seat
from fsdpcheck.comparison.results import World
from fsdpcheck.comparison.runs import Run

_WATCHED: Final = 32
"""Entries of a tensor in parts that are looked at: those that lie farthest apart."""
_MARK: Final = re.compile(r"\s*# (begin|end) (.+)")


class NotShown(Exception):
    """No such program can be written; the text says why."""


def program(world: World, runs: Runs) -> str:
    """The program for what differs in ``world``, one of ``runs``. Raises NotShown."""
    if runs.options.cuda_as_cpu:
        raise NotShown("GPUs were played, which processes on gloo have not")
    if world.warning:
        raise NotShown(f"it was found without statistics of batches, which the script has: {world.warning}")
    if world.failure is not None:
        command = f"torchrun --nproc-per-node {world.size} {shlex.join(runs.line.words_at(world.size))}"
        raise NotShown(f"the script fails, and shows it itself: {command}")
    runs.get(run for size in (runs.base, world.size) for run in (Run(size), raised(size)))
    fact, key = world.fact, world.first.key if world.first is not None else None
    if key is not None:
        return _Sought(key, runs, world.size).beside_base()
    if fact is not None and fact.kind == "steps":
        return _Sought(Key(0, "steps of each optimizer", ""), runs, world.size).steps()
    if fact is not None and fact.key is not None and fact.kind == "option":
        return _Sought(fact.key, runs, world.size).option()
    if fact is not None and fact.key is not None and fact.kind == "replicas":
        return _Sought(fact.key, runs, world.size).replicas()
    raise NotShown(f"{fact.kind if fact is not None else 'what is undecidable'} is nothing that an optimizer has")


@dataclass(frozen=True)
class _Sought:
    """What the program looks at: ``key``, on ``size`` ranks."""

    key: Key
    runs: Runs
    size: int

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.runs.base, self.size

    def beside_base(self) -> str:
        """Numbers beside those of the base."""
        moments = self._moments()
        half, far = self._half()
        got, wanted = (self.runs.values(Run(size)).get(self.key) for size in self._sizes[::-1])
        shape = next(list(value.shape) for value in (got, wanted) if value is not None)
        constants = {"HALF": half, "SHAPE": shape or [1], "PLACES": [], **self._looking()}
        if not self._is_in_parts():
            return self._text(far, {"whole", "plain", "meet", "apart", *moments}, constants)
        if got is None or wanted is None or got.shape != wanted.shape:
            raise NotShown(f"{self.key} lies in parts, and its shapes are not the same")
        distances = (got.double() - wanted.double()).reshape(-1).abs().nan_to_num(math.inf)
        places = distances.topk(min(len(distances), _WATCHED)).indices.sort().values
        parts = {size: dict(self._parts(size, places)) for size in self._sizes}
        constants |= {"PLACES": places.tolist(), "PARTS": parts}
        far += f"; of its entries, those {len(places)} that lay farthest apart are looked at"
        return self._text(far, {"whole", "parts", "meet", "apart", *moments}, constants)

    def steps(self) -> str:
        """How many steps each rank makes."""
        wanted = list(next(record.steps for record in self.runs.done[Run(self.runs.base)].ranks))
        return self._text("not the same", {"by rank", "number", "steps", "apart"}, {"WANTED": wanted, "STEP": -1})

    def option(self) -> str:
        """What each rank's optimizer has."""
        wanted = self.runs.values(Run(self.runs.base))[self.key].reshape(-1).tolist()
        parts = {"by rank", "number", "meet", "local", "apart", *self._moments()}
        return self._text("not the same", parts, {"WANTED": wanted, **self._looking()})

    def replicas(self) -> str:
        """What ranks have of what should be the same on all."""
        found = self.runs.whole(Run(self.size)).replicas.get(self.key)
        if found is None:
            raise NotShown("in the script's own precision the replicas are equal")
        one, pieces, seats = found.one, self._pieces(self.size), self._seats(self.size)
        alike = [rank for rank, piece in pieces.items() if _same_places(piece, pieces[one])]
        if found.other not in alike or any(seats[rank].offset for rank in alike if rank in seats):
            raise NotShown(f"ranks {one} and {found.other} have other parts of {self.key}")
        looking = self._looking()
        looking["SEATS"] = {self.size: {rank: at for rank, at in looking["SEATS"][self.size].items() if rank in alike}}
        return self._text("not the same", {"by rank", "replicas", "meet", "local", "apart", *self._moments()}, looking)

    def _half(self) -> tuple[float, str]:
        """Half of what was measured, and a sentence about it."""
        own, in_float64 = self._apart(*map(Run, self._sizes)), self._apart(*map(raised, self._sizes))
        if math.isinf(own):
            return sys.float_info.max, "where the one has a number and the other has none"
        if not abs(own - in_float64) < own / 2:
            raise NotShown(
                f"{self.key} is apart by {in_float64:.3g} in float64 and by {own:.3g} in the script's own precision, "
                "whose rounding hides it"
            )
        return own / 2, (
            f"more than HALF apart: half of the {own:.6g} that was measured between simulated ranks in its own "
            f"precision (in float64 {in_float64:.6g})"
        )

    def _apart(self, base: Run, run: Run) -> float:
        one, other = (
            {key: value for key, value in self.runs.values(each).items() if key == self.key} for each in (base, run)
        )
        if not one and not other:
            raise NotShown(f"nobody has {self.key}")
        return between(one, other)[self.key].apart

    def _moments(self) -> set[str]:
        """When it is looked for."""
        what = self.key.kind.partition(" ")[0]
        if what == "checkpoint":
            raise NotShown("a checkpoint is nothing that an optimizer has")
        if what == "norm":
            if any(self.key not in record.pieces for record in self.runs.done[Run(self.size)].ranks):
                raise NotShown("not every rank has such a norm")
            return {"norm"}
        return {"look", *{"gradient": ("gradient", "after"), "initial": ("before",), "option": ("before",)}.get(
            what, ("after",))}  # fmt: skip

    def _looking(self) -> dict[str, Any]:
        """Where it is looked for."""
        if self.key.kind == "norm":
            return {"NUMBER": int(self.key.name), "SEATS": {self.size: {}}}
        for size in self._sizes:
            if any(not record.steps for record in self.runs.done[Run(size)].ranks):
                raise NotShown("a rank makes no step")
            if not self._seats(size):
                raise NotShown(f"no optimizer is known to have {self.key.name}")
        return {"SEATS": {size: {rank: seat[:2] for rank, seat in self._seats(size).items()} for size in self._sizes}}

    def _pieces(self, size: int) -> dict[int, Piece]:
        ranks = self.runs.done[Run(size)].ranks
        return {rank: record.pieces[self.key] for rank, record in enumerate(ranks) if self.key in record.pieces}

    def _seats(self, size: int) -> dict[int, Seat]:
        ranks = self.runs.done[Run(size)].ranks
        name = self.key.name
        return {rank: record.seats[name] for rank, record in enumerate(ranks) if name in record.seats}

    def _is_in_parts(self) -> bool:
        """Whether ranks have parts that torch does not put together."""
        found = [(self._pieces(size), self._seats(size)) for size in self._sizes]
        return any(
            piece.places is not None and not (rank in seats and seats[rank].is_dtensor)
            for pieces, seats in found
            for rank, piece in pieces.items()
        )

    def _parts(self, size: int, wanted: Tensor) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """By rank, which of its own values stand where among those that are looked at: (from, to, how many)."""
        for rank, piece in self._pieces(size).items():
            there = torch.arange(len(piece.values)) if piece.places is None else piece.places
            offset = self._seats(size)[rank].offset if rank in self._seats(size) else 0
            runs: list[tuple[int, int, int]] = []
            for place, value in enumerate(wanted.tolist()):
                for local in (there == value).nonzero().reshape(-1).tolist():
                    if runs and runs[-1][0] + runs[-1][2] == local + offset and runs[-1][1] + runs[-1][2] == place:
                        runs[-1] = *runs[-1][:2], runs[-1][2] + 1
                    else:
                        runs.append((local + offset, place, 1))
            if runs:
                yield rank, runs

    def _text(self, far: str, parts: set[str], constants: Mapping[str, Any]) -> str:
        line, base = self.runs.line, self.runs.base
        words = {size: list(line.words_at(size)) for size in (base, self.size)}
        if any(note.startswith("dropout is off") for note, _ in self.runs.notes()):
            parts.add("dropout")
        if self.runs.draws.seed is not None:
            parts, constants = {*parts, "seed"}, {"SEED": self.runs.draws.seed, **constants}
        what = str(self.key) if self.key.name else self.key.kind
        every = {"WHAT": what, "STEP": self.key.step, "BASE": base, "RANKS": self.size, "WORDS": words, **constants}
        about = _DOCUMENT.format(
            *(what, _ranks(self.size), _ranks(base), self.size, shlex.join(words[self.size]), far),
            " Nothing is dropped." if "dropout" in parts else "",
        )
        text = _cut(inspect.getsource(witness), parts, every)
        text = text.replace(inspect.getdoc(witness) or "", about.replace("\\", "\\\\").replace('"', '\\"'))
        return text.replace("return parameter.grad  # sought", f"return {_of_parameter(self.key.kind)}")


_DOCUMENT: Final = """{0}: {1} beside {2}, with torch alone.

    torchrun --nproc-per-node {3} FILE

It runs this, as it is, in the folder from which it is found, with what is given after FILE added:

    {4}

It prints what an optimizer has and ends by 1 if the two are {5}. Else it ends by 0.{6}
"""


def _of_parameter(kind: str) -> str:
    """What is sought, as an expression."""
    what, _, name = kind.partition(" ")
    if what == "state":
        return f"optimizer.state.get(parameter, {{}}).get({name!r})"
    if what == "option":
        name, _, number = name.partition(".")
        return f"group[{name!r}]" + (f"[{number}]" if number else "")
    return "parameter.grad" if what == "gradient" else "parameter"


def _cut(text: str, parts: set[str], constants: Mapping[str, Any]) -> str:
    """What lies between marks of other parts is left out, and so are the marks; constants stand in place of a case."""
    kept: list[str] = []
    inside: list[str] = []
    for line in text.splitlines():
        mark = _MARK.fullmatch(line)
        if mark is None:
            if all(name in parts for name in inside):
                kept.append(line)
        elif mark[1] == "end":
            inside.remove(mark[2])
        else:
            inside.append(mark[2])
            if mark[2] == "case":
                kept += [f"{name} = {value!r}" for name, value in constants.items()]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)) + "\n"


def _same_places(one: Piece, other: Piece) -> bool:
    if one.shape != other.shape or (one.places is None) != (other.places is None):
        return False
    return one.places is None or other.places is None or torch.equal(one.places, other.places)


def _ranks(size: int) -> str:
    return "one rank" if size == 1 else f"{size} ranks"
