"""A night: the nightly tests, and laws on other cases than the night before, in slices of at most ten minutes.

Some run now and the rest another time.

``python -m benchmarks night [PART ...] [--shard K/N] [--limit-minutes M]``: runs what of the night is not in the record
yet, benchmarks/night.jsonl, and appends a line for each slice as it ends. ``--list`` shows the slices and what is
expected of them, ``--status`` what is done of this night and how old the last whole one is. Shard K of N takes each
N-th slice, so that several machines share a night; ``cat`` puts their lines together.

A night belongs to the content of fsdpcheck/, impl/ and properties/ (that of tests also to their folder and to what all
tests share) and to a release of torch: a commit that changes nothing of it changes no night. Its seed follows from the
content, so each night draws other cases. A slice that was interrupted, or whose process somebody ended by a signal, has
no line and is run again; one that failed has one, and is not: the code is 1 until its line is deleted or the content
changes. When nothing is left, a line tells the whole night.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.night.record import RECORD, Record
from benchmarks.night.tonight import listed, night, standing, taken


def lines(
    *only: str,
    shard: tuple[int, int] = (1, 1),
    list: bool = False,
    status: bool = False,
    limit_minutes: float | None = None,
) -> Iterator[str]:
    """What ``python -m benchmarks night`` prints; raises SystemExit unless the code is 0."""
    from benchmarks.night.parts import PARTS, without

    names = [*dict.fromkeys(part.kind for part in PARTS)]
    if unknown := set(only) - {*names, *(part.name for part in PARTS)}:
        raise SystemExit(f"night: there is no part {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    tonight = night([part for part in PARTS if not only or {part.name, part.kind} & set(only)], Record(RECORD))
    if list:
        yield from listed(tonight, shard)
    elif status:
        yield from standing(tonight)
    else:
        yield from taken(tonight, shard, limit_minutes, None if only else without())
