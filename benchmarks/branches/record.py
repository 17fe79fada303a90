"""The union on record, ``branches.json``: how many branches there are, and which session reached each first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.branches.reasons import Sorted
from benchmarks.branches.union import Branch
from benchmarks.revision import revision

FILE: Final = Path(__file__).parent.parent / "branches.json"


def write(found: Sorted, first: Mapping[str, set[Branch]]) -> None:
    """Replace the record."""
    counts = {name: len(getattr(found, name)) for name in ("taken", "refusals", "reasoned", "left")}
    reached = {name: sorted(map(str, own)) for name, own in first.items()}
    FILE.write_text(json.dumps({"commit": revision(), **counts, "first": reached}, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, Any]:
    """The record."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def first(name: str) -> set[str]:
    """What a session was the first to reach."""
    return set(read()["first"][name])


def told(record: Mapping[str, Any]) -> Iterator[str]:
    """Counts and shares, as documents quote them."""
    every = sum(record[name] for name in ("taken", "refusals", "reasoned", "left"))
    known = every - record["left"]
    yield f"{every} branches of functions: {record['taken']} are taken in cases of laws,"
    yield f"{record['refusals']} raise an error, {record['reasoned']} have a written reason, {record['left']} are left:"
    yield f"{100 * known / every:.1f} % are known"
