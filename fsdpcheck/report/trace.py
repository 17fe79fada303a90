"""What is wrong in traces: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.errors import FINDING, HOLDS, NO_PROGRESS
from fsdpcheck.execution import Failure
from fsdpcheck.execution.matching import ranks_text
from fsdpcheck.report.colour import Paint
from fsdpcheck.traces import checking, plain
from fsdpcheck.traces.job import Job

SCHEMA: Final = 2
"""Version of the document; it grows with every change that a reader could notice."""


@dataclass(frozen=True)
class Checked:
    """A job, where it was read from, and what is wrong with it."""

    paths: Sequence[Path]
    job: Job
    failure: Failure | None

    @property
    def exit_code(self) -> int:
        """0 nothing wrong; 1 a finding; 4 ranks stood in a call with a rank of which there is no dump."""
        return FINDING if self.failure is not None else NO_PROGRESS if self.undecided else HOLDS

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(checking.undecided(self.job)) if self.failure is None else ()

    @property
    def notes(self) -> tuple[str, ...]:
        under_way = checking.under_way(self.job) if self.failure is None and not self.undecided else ()
        return (*under_way, *self.job.notes)


def ending(checked: Checked, paint: Paint) -> str:
    """The report: what is wrong, or what was compared, and what could not be known."""
    return "\n".join([*_head(checked, paint), *(f"  {paint('note', 'yellow')}: {note}" for note in checked.notes)])


def _head(checked: Checked, paint: Paint) -> list[str]:
    if checked.failure is not None:
        first, *rest = checked.failure.text.split("\n")
        return [paint(first, "red"), *rest]
    if checked.undecided:
        first, *rest = checked.undecided
        missing = "  next: add the missing dumps; a rank without one has crashed, or was killed"
        return [paint(f"undecided: {first}", "yellow"), *(f"  {sentence}" for sentence in rest), missing]
    job = checked.job
    calls = sum(map(len, job.traces.values()))
    of = "" if len(job.traces) == job.world_size else f", of {job.world_size} ranks,"
    said = f"the calls of {ranks_text(job.traces)}{of} agree ({calls} in all)"
    return [f"{paint('nothing wrong', 'green')}: {said}, and no ranks wait for one another in a ring"]


def document(checked: Checked) -> dict[str, Any]:
    """The same as JSON data.

    {schema, fsdpcheck, paths, world_size, exit_code, failure, undecided, ranks, notes}; ``failure`` as that of a
    simulation (report/simulation.py), ``ranks``: {rank, calls, state} of those that are known, ``calls`` their number.
    """
    job = checked.job
    return {
        "schema": SCHEMA,
        "fsdpcheck": __version__,
        "paths": [str(path) for path in checked.paths],
        "world_size": job.world_size,
        "exit_code": checked.exit_code,
        "failure": plain.of_failure(checked.failure),
        "undecided": list(checked.undecided),
        "ranks": [
            {"rank": rank, "calls": len(job.traces[rank]), "state": type(job.states[rank]).__name__.lower()}
            for rank in sorted(job.traces)
        ],
        "notes": list(checked.notes),
    }
