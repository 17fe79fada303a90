"""What a pair of programs is: a faulty torch.distributed program and its correct twin, and where to find them all."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.communication import programs

KINDS: Final[dict[str, str]] = {
    "deadlock": "no rank that is left can move, whatever the backend buffers",
    "unsafe": "comes to its end only on a backend that buffers messages or lets a root leave early",
    "mismatch": "ranks meet in calls that disagree: operation, reduction, root, dtype, shape, or subject",
    "in-flight": "a buffer is read, written or freed between the issue of a call and its wait",
    "never waited": "the work of an asynchronous call is never waited for",
    "order": "what ranks return, or whether they come to their end, depends on the schedule",
    "raised": "a rank raises, by itself",
    "exited": "a rank leaves the interpreter while others need it",
    "lost": "the process of a rank is gone without a word while others need it",
    "leak": "a communicator or a thread is left behind",
}
"""Kind of verdict -> what it says of a program."""

HERE: Final = "# here"
"""Marks the lines of which a report must name one."""

PROGRAMS: Final = Path(programs.__path__[0])
"""The folder that has the programs."""
FROZEN: Final = ("frozen", "frozen_later")
"""The folders of pairs that were fixed before fsdpcheck first ran them, as they came."""
_PREFIXES: Final = (Path(__file__).parents[2], Path(torch.__file__).parents[1])

Program = Callable[[bool], object]


@dataclass(frozen=True)
class Expected:
    """What a judge must say of a faulty program: one of ``kinds``, and ``ranks``, or () if all are as much at fault."""

    kinds: tuple[str, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """``program(True)`` has a bug of the class, ``program(False)`` has none: it returns the same on every schedule."""

    name: str
    class_: str
    world_size: int
    program: Program
    expected: Expected

    @property
    def frozen(self) -> str:
        """The folder of pairs that were fixed before fsdpcheck first ran them which has this one, or ""."""
        folder = self.file.parent.name
        return folder if folder in FROZEN else ""

    @property
    def file(self) -> Path:
        """The file that has the program."""
        return Path(inspect.getfile(self.program))

    @property
    def lines(self) -> tuple[int, ...]:
        """The numbers of the lines in ``file`` of which a report must name one."""
        return _marked(self.program)

    def is_named_by(self, kinds: Collection[str], ranks: Collection[int], lines: Collection[int]) -> bool:
        """Whether a report that names these is right of the faulty program, strictly.

        One of its kinds is expected, one of its lines is marked, and every rank at fault is among its ranks."""
        return bool(set(kinds) & set(self.expected.kinds)) and self.is_placed_by(ranks, lines)

    def is_placed_by(self, ranks: Collection[int], lines: Collection[int]) -> bool:
        """Whether line and ranks are right, whatever the report takes it for."""
        at_line = not self.lines or bool(set(lines) & set(self.lines))
        return at_line and set(self.expected.ranks) <= set(ranks)

    def lines_in(self, text: str) -> frozenset[int]:
        """The lines of ``file`` that a text names."""
        path = without_prefixes(str(self.file))
        return frozenset(int(line) for line in re.findall(re.escape(path) + r":(\d+)", text))

    def run(self, faulty: bool) -> object:
        """Run the program as this rank, and leave its groups as a script that ends well does."""
        returned = self.program(faulty)
        if dist.is_initialized():
            dist.destroy_process_group()
        return returned


@cache
def _marked(program: Program) -> tuple[int, ...]:
    lines, first = inspect.getsourcelines(program)
    return tuple(first + at for at, line in enumerate(lines) if HERE in line)


_FOUND: Final[list[Pair]] = []


def pair(class_: str, world_size: int, *kinds: str, ranks: tuple[int, ...] = ()) -> Callable[[Program], Program]:
    """Make a pair of a program, under the name of the function."""

    def register(program: Program) -> Program:
        _FOUND.append(Pair(program.__name__, class_, world_size, program, Expected(kinds, ranks)))
        return program

    return register


def join() -> tuple[int, int]:
    """Join the world that the environment describes, as torchrun sets it: this rank, and how many there are."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def pairs() -> tuple[Pair, ...]:
    """Every pair, by class and name."""
    for module in pkgutil.walk_packages(programs.__path__, f"{programs.__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted(_FOUND, key=lambda pair: (pair.class_, pair.name)))


def without_prefixes(text: str) -> str:
    """The text with paths of files of this repository relative to it, and those of packages to where they lie."""
    for prefix in _PREFIXES:
        text = text.replace(f"{prefix}{os.sep}", "")
    return text


def frozen_digests(folder: str) -> dict[str, str]:
    """The SHA-256 of each file of a folder of frozen pairs, as ``FOLDER.json`` has them, by name of the file."""
    files = sorted((PROGRAMS / folder).glob("*.py"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
