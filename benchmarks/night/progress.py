"""What a night is at: a bar on a terminal, nothing beside the lines of ended slices elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.night.slices import Slice


@contextmanager
def shown(slices: Sequence[Slice]) -> Iterator[Callable[[Slice], None]]:
    """A function to call as a slice begins; the bar grows by what was expected of the one before."""
    if not sys.stdout.isatty():
        yield lambda one: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    share, name = TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}")
    with Progress(BarColumn(), share, TimeElapsedColumn(), name) as progress:
        task = progress.add_task("", total=sum(one.seconds for one in slices))
        before: list[Slice] = []

        def begins(one: Slice) -> None:
            advance = before.pop().seconds if before else 0.0
            progress.update(task, advance=advance, description=one.name.replace("[", r"\["))
            before.append(one)

        yield begins
