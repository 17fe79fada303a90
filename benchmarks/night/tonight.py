"""The night of the present content: its slices, what is left of them, and a sitting that runs some."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.night.progress import shown
from benchmarks.night.record import ROOT, WHOLE, Record, Row, digest, stamp, whole_night, words
from benchmarks.night.runner import EndedFromOutside, row_of
from benchmarks.night.slices import Part, Slice, shard_of

_INTERRUPTED: Final = 130


@dataclass(frozen=True)
class Night:
    """Parts, their slices, and the record. ``tree``: digest of all that the parts depend on."""

    parts: tuple[Part, ...]
    slices: tuple[Slice, ...]
    record: Record
    tree: str

    @property
    def left(self) -> list[Slice]:
        """Slices that are not in the record."""
        return [one for one in self.slices if not self.record.has(one)]

    @property
    def rows(self) -> list[Row]:
        """What the record has of this night."""
        trees = dict.fromkeys((one.part, one.tree) for one in self.slices)
        return [row for part, tree in trees for row in self.record.of(part, tree)]

    @property
    def folders(self) -> tuple[str, ...]:
        """What the parts depend on."""
        return _folders(self.parts)


def night(parts: Sequence[Part], record: Record, root: Path = ROOT) -> Night:
    """The night of the content under ``root``; its seed follows from the content too."""
    slices: list[Slice] = []
    for part in parts:
        tree = digest(part.folders, root)
        cut = part.slices(record.measured(part.name, tree), int(tree[:6], 16))
        slices += [replace(one, tree=tree) for one in cut]
    return Night(tuple(parts), tuple(slices), record, digest(_folders(parts), root))


def taken(
    tonight: Night, shard: tuple[int, int], limit_minutes: float | None = None, without: Sequence[str] | None = None
) -> Iterator[str]:
    """Run what is left of a shard, a line a slice; exits with 1 if one of the night has failed, or of these was ended.

    ``without``: honest adapters that are not installed. None: some parts are left out, so that no night gets whole.
    """
    own = shard_of(tonight.slices, shard)
    left = [one for one in own if not tonight.record.has(one)]
    yield f"{len(own) - len(left)} of {len(own)} slices of shard {shard[0]}/{shard[1]} are in the record"
    any_ended = yield from _sitting(tonight, left, limit_minutes)
    if without is not None and tonight.slices and not tonight.left:
        yield from _closed(tonight, without)
    failed = [row for row in tonight.rows if row["failed"]]
    yield from (f"FAILED {row['part']}: {'; '.join(row['findings'])}" for row in failed)
    if failed or any_ended:
        raise SystemExit(1)


def _sitting(tonight: Night, left: Sequence[Slice], limit_minutes: float | None) -> Generator[str, None, bool]:
    """Run slices; returns whether somebody else ended one, which has no row then."""
    began, any_ended = time.monotonic(), False
    with shown(left) as begins:
        for number, one in enumerate(left):
            if limit_minutes is not None and time.monotonic() - began > 60 * limit_minutes:
                yield f"{len(left) - number} slices are left after {limit_minutes:g} minutes; next: the same again"
                return any_ended
            begins(one)
            try:
                row = {**row_of(one), **stamp(tonight.folders)}
            except KeyboardInterrupt:
                yield f"interrupted in {one.name}; what had ended is kept"
                raise SystemExit(_INTERRUPTED) from None
            except EndedFromOutside as ended:
                any_ended = True
                yield f"[{number + 1}/{len(left)}] ENDED  {one.name}: by {ended}; no line, next: the same again"
            else:
                tonight.record.add(row)
                yield f"[{number + 1}/{len(left)}] {_told(row, one)}"
    return any_ended


def _closed(tonight: Night, without: Sequence[str]) -> Iterator[str]:
    """The line of a whole night, once."""
    if not tonight.record.of(WHOLE, tonight.tree):
        tonight.record.add(whole_night(tonight.rows, stamp(tonight.folders), tonight.tree, without))
    yield words(tonight.record.last_whole)


def listed(tonight: Night, shard: tuple[int, int]) -> Iterator[str]:
    """Each slice of a shard: what is expected of it, and whether it is done."""
    own = shard_of(tonight.slices, shard)
    for one in own:
        done = "done" if tonight.record.has(one) else ""
        yield f"{done:<5}{one.seconds:>6.0f} s  {one.name}{', longer than a slice may be' * one.too_long}"
    yield f"{len(own)} slices, {_hours(own)}"


def standing(tonight: Night) -> Iterator[str]:
    """Part by part what is done and what is missing, then the last whole night and its age."""
    left = tonight.left
    for kind, what in {part.kind: part.what for part in tonight.parts}.items():
        names = {part.name for part in tonight.parts if part.kind == kind}
        own, missing = ([one for one in slices if one.part in names] for slices in (tonight.slices, left))
        failed = sum(bool(row["failed"]) for row in tonight.rows if row["part"] in names)
        done = f"{len(own) - len(missing):>4} of {len(own):>4} slices"
        yield f"{kind:<9}{done}, {failed} failed; left: {_hours(missing)} ({what})"
    yield f"left of this night: {len(left)} slices, {_hours(left)}"
    last = tonight.record.last_whole
    age = f" Its age: {(datetime.now(UTC) - datetime.fromisoformat(last['date'])).days} days." if last else ""
    yield words(last) + age


def _told(row: Row, one: Slice) -> str:
    counted = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped, {row['cases']} cases"
    return f"{'FAILED' if row['failed'] else 'ok':<6} {one.name}: {counted}, {row['processor']:.0f} s of processor time"


def _hours(slices: Iterable[Slice]) -> str:
    return f"{sum(one.seconds for one in slices) / 3600:.1f} hours of one core expected"


def _folders(parts: Iterable[Part]) -> tuple[str, ...]:
    return tuple(sorted({folder for part in parts for folder in part.folders}))
