"""The record of nights: a JSON line for each slice that ended, and one for each whole night."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.night.slices import Slice
from benchmarks.revision import revision

ROOT: Final = Path(__file__).parents[2]
RECORD: Final = ROOT / "benchmarks" / "night.jsonl"
WHOLE: Final = "whole night"
Row = dict[str, Any]


def digest(folders: Iterable[str], root: Path = ROOT) -> str:
    """Of names and bytes of all files in ``folders`` but what Python makes of them: equal trees, equal digests.

    A file may stand among the folders.
    """
    found = hashlib.sha256()
    for path in sorted({path for folder in folders for path in _files(root / folder)}):
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts):
            found.update(f"{path.relative_to(root).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _files(place: Path) -> Iterator[Path]:
    yield from [place] if place.is_file() else (path for path in place.rglob("*") if path.is_file())


def release() -> str:
    """torch, without the way it was built."""
    return str(torch.__version__).partition("+")[0]


def stamp(folders: Iterable[str]) -> Row:
    """Where and when: commit (``+``: with changes to ``folders``), torch, python, date."""
    asked: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    changed = subprocess.run(["git", "status", "--porcelain", "--", *folders], **asked).stdout.strip()
    return {
        "commit": revision() + "+" * bool(changed),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class Record:
    """The rows of a file. A line that a kill has cut off is no row, and the next one does not continue it."""

    def __init__(self, path: Path = RECORD) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = [row for line in lines if (row := _row(line)) is not None]

    def add(self, row: Row) -> None:
        """Keep a row; it is a line of the file at once."""
        self.rows.append(row)
        whole = not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * (not whole) + json.dumps(row) + "\n")

    def of(self, part: str, tree: str) -> list[Row]:
        """Rows of a part at this content of its folders, on this release of torch."""
        here = [row for row in self.rows if (row["part"], row["tree"]) == (part, tree)]
        return [row for row in here if row["torch"].partition("+")[0] == release()]

    def has(self, one: Slice) -> bool:
        """Is each item of the slice in a row?"""
        return set(one.items) <= {item for row in self.of(one.part, one.tree) for item in row["items"]}

    def measured(self, part: str, tree: str) -> dict[str, float]:
        """Item -> seconds that it took last, at other contents than this: what is cut must not move while it runs."""
        rows = [row for row in self.rows if row["part"] == part and row["tree"] != tree]
        return {item: seconds for row in rows for item, seconds in row["items"].items()}

    @property
    def last_whole(self) -> Row | None:
        """The newest whole night."""
        return max((row for row in self.rows if row["part"] == WHOLE), key=lambda row: row["date"], default=None)


def whole_night(rows: Sequence[Row], where: Mapping[str, Any], tree: str, without: Sequence[str]) -> Row:
    """The row of a night of which all slices are ``rows``."""
    counts = ("cases", "passed", "failed", "skipped", "processor", "wall")
    sums = {what: round(sum(row[what] for row in rows), 1) for what in counts}
    seeds = sorted({row["seed"] for row in rows if row["seed"] is not None})
    found = [finding for row in rows for finding in row["findings"]]
    began = {"part": WHOLE, "tree": tree, "items": {}, "slices": len(rows), "seeds": seeds, "findings": found}
    return {**began, **sums, "without": list(without), **where}


def words(row: Row | None) -> str:
    """What the README says of the last whole night."""
    if row is None:
        return "Last whole night: none yet."
    without = f", without {', '.join(row['without'])}" * bool(row["without"])
    counted = f"{row['slices']} slices, {row['cases']:,} cases, {row['failed']} failed{without}"
    return f"Last whole night: {row['date'][:10]}, commit {row['commit']}, torch {row['torch']}: {counted}."


def _row(line: str) -> Row | None:
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
