"""Branches of the reference that laws reach: the union of many sessions, and a written reason for each that is left.

``python -m benchmarks branches FOLDER [GLOB] [--shard K/N]`` runs the sessions (``rows.py``) that FOLDER has no data
of. Once it has those of all, the union goes into ``branches.json``. Delete FOLDER after a change of code.
``python -m benchmarks branches-now [GLOB]`` asks sessions of the record again: what each of them was the first to reach
must be reached.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.branches import reasons, record
from benchmarks.branches.rows import ROWS, Failed, run
from benchmarks.branches.union import Branch, branches, taken


def lines(folder: str, glob: str = "*", shard: tuple[int, int] = (1, 1)) -> Iterator[str]:
    """A line a session as it ends, then the union of all there are. Exits with 1 if a branch has no reason."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    wanted = [row for row in ROWS if fnmatchcase(row.name, glob)][shard[0] - 1 :: shard[1]]
    for row in wanted:
        if not row.data(place).exists():
            try:
                yield f"{row.name}: {run(row, row.data(place))}"
            except Failed as error:
                yield str(error)
    missing = [row.name for row in ROWS if not row.data(place).exists()]
    if missing:
        yield f"{len(missing)} of {len(ROWS)} sessions are left: {', '.join(missing)}"
        raise SystemExit(1)
    first = _first(place)
    every = branches([row.data(place) for row in ROWS])
    found = reasons.sorted_out(every, {one for own in first.values() for one in own})
    record.write(found, first)
    yield from record.told(record.read())
    if found.left or found.stale:
        yield from (f"no reason: {one}" for one in sorted(found.left))
        yield from (f"stale reason: {one}" for one in found.stale)
        raise SystemExit(1)


def now(glob: str = "*") -> Iterator[str]:
    """Sessions of the record again. Exits with 1 where one no longer reaches what it was the first to reach."""
    lost: list[str] = []
    for row in (row for row in ROWS if fnmatchcase(row.name, glob)):
        with tempfile.TemporaryDirectory(prefix="fsdpcheck-branches-") as scratch:
            run(row, row.data(Path(scratch)))
            missed = record.first(row.name) - {str(one) for one in taken(row.data(Path(scratch)))}
        yield f"{row.name}: {len(record.first(row.name)) - len(missed)} of {len(record.first(row.name))} are reached"
        lost += [f"{row.name}: {one}" for one in sorted(missed)]
    yield from (f"no longer reached: {one}" for one in lost)
    if lost:
        raise SystemExit(1)


def _first(place: Path) -> dict[str, set[Branch]]:
    """Session -> the branches that it is the first of all to reach."""
    seen: set[Branch] = set()
    first: dict[str, set[Branch]] = {}
    for row in ROWS:
        own = taken(row.data(place))
        first[row.name] = own - seen
        seen |= own
    return first
