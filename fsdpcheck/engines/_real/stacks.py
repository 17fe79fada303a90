"""Stacks of other processes, by signal: faulthandler writes them even from C code that never lets Python run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdpcheck.compat import frames_private
from fsdpcheck.engines._real.follower import STACK_SIGNAL

_ENGINES = f"{os.sep}fsdpcheck{os.sep}engines{os.sep}"
"""In the path of every engine's file, whichever copy of fsdpcheck a worker runs."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_PATIENCE_SECONDS = 2.0
"""How long evidence is waited for, in processor time of who waits, which a busy machine gives neither of the two. It
decorates a verdict and never makes one."""


@dataclass(frozen=True, slots=True)
class Stack:
    """``where``: file:line of the innermost frame of an implementation. ``lines``: outermost frame first."""

    where: str = ""
    lines: tuple[str, ...] = ()


def collect(files: Mapping[int, Path], pids: Mapping[int, int], alive: Callable[[int], bool]) -> dict[int, Stack]:
    """Ask each process for its stack and read what it writes. A rank that dies or stays silent has an empty one."""
    starts = {rank: path.stat().st_size for rank, path in files.items()}
    for rank in files:
        if alive(rank):
            os.kill(pids[rank], STACK_SIGNAL)
    texts: dict[int, str] = {}
    until = time.thread_time() + _PATIENCE_SECONDS
    while len(texts) < len(files) and all(map(alive, files)) and time.thread_time() < until:
        for rank, path in files.items():
            written = path.read_text()[starts[rank] :]
            if _is_whole(written):
                texts[rank] = written
    return {rank: parse(texts.get(rank, "")) for rank in files}


def parse(text: str) -> Stack:
    """A stack from faulthandler's text (most recent call first)."""
    frames = [match for match in map(_FRAME.fullmatch, text.splitlines()) if match]
    ours = (frame for frame in frames if not (frames_private.is_plumbing(frame["file"]) or _ENGINES in frame["file"]))
    where = next((f"{frame['file']}:{frame['line']}" for frame in ours), "")
    return Stack(where, tuple(frame[0] for frame in reversed(frames)))


def _is_whole(text: str) -> bool:
    return text.endswith(("in <module>\n", "  ...\n", "in _run_module_as_main\n"))  # a program, a deep stack, python -m
