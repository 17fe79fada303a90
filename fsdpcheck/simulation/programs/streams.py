"""What ranks print, and what they read: one stream for all of them that knows which rank it is called by."""

from __future__ import annotations

import io
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.simulation.current_rank import current_rank


class Printed:
    """What each rank has printed so far, as the user would see it of a process: stdout and stderr as they came."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._texts: dict[int, list[str]] = defaultdict(list)

    def of(self, rank: int) -> str:
        return "".join(self._texts[rank])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, stdout and stderr put the rank before each of its lines, and stdin has nothing for ranks."""
        before = sys.stdout, sys.stderr, sys.stdin
        out, err = RankStream(sys.stdout, self._note, self._show), RankStream(sys.stderr, self._note, self._show)
        sys.stdout, sys.stderr, sys.stdin = out, err, _NoInput()
        try:
            yield
        finally:
            out.end()
            err.end()
            sys.stdout, sys.stderr, sys.stdin = before

    def _note(self, rank: int, text: str) -> None:
        self._texts[rank].append(text)


@contextmanager
def descriptors_kept() -> Iterator[None]:
    """While open, to read from descriptor 0 is an error; afterwards 0, 1 and 2 are what they were, whoever closed them.

    For a process that runs nothing but the ranks.
    """
    kept = {number: os.dup(number) for number in (0, 1, 2) if _is_open(number)}
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        yield
    finally:
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


class RankStream(io.TextIOBase):
    """Writes to ``under`` line by line, "[rank 2] " before each line of rank 2.

    It is one object for all ranks, so a handler of ``logging`` that one rank has made serves them all.
    """

    def __init__(self, under: TextIO, note: Callable[[int, str], None], show: bool) -> None:
        self._under, self._note, self._show = under, note, show
        self._begun: dict[int, str] = defaultdict(str)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._under.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._under.errors

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._under.fileno()

    def write(self, text: str) -> int:
        rank = current_rank()
        if rank is None:
            return self._under.write(text)
        self._note(rank, text)
        if self._show:
            *whole, self._begun[rank] = (self._begun[rank] + text).split("\n")
            for line in whole:
                self._under.write(f"[rank {rank}] {line}\n")
        return len(text)

    def flush(self) -> None:
        self._under.flush()

    def end(self) -> None:
        """Write out lines that were begun."""
        for rank, text in sorted(self._begun.items()):
            if text:
                self._under.write(f"[rank {rank}] {text}\n")
        self._begun.clear()
        self._under.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


class _NoInput(io.TextIOBase):
    """What a rank reads from: W ranks cannot share one keyboard."""

    def read(self, size: int | None = -1) -> NoReturn:
        _refuse()

    def readline(self, size: int = -1) -> NoReturn:  # type: ignore[override]
        _refuse()

    def fileno(self) -> int:
        raise io.UnsupportedOperation("stdin of a simulated rank is no file")


def _refuse() -> NoReturn:
    raise NotSupported(
        explain(
            "a rank reads from stdin, and simulated ranks have none",
            got=f"rank {current_rank()} waits for input",
            wanted="a program that asks nobody while it trains",
            then="give the answer by an argument, or run on real ranks",
        )
    )
