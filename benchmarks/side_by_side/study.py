"""``python -m benchmarks side-by-side [FILE [GLOB]] --in DIR [--shard K/N]``: what each arm says of each fault.

DIR holds PyTorch's tests of ``fully_shard``, test/distributed/_composable/fsdp/*.py; those of Opacus are in its wheel.
GLOB is of FAULT, or of FAULT:ARM. A row a fault and arm is kept in FILE (JSON lines; by default the project's record,
benchmarks/side_by_side/results.jsonl) with the commit; what it holds is not run again. At the end the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import Kept
from benchmarks.revision import revision
from benchmarks.side_by_side import table
from benchmarks.side_by_side.faults import ALL, SIDES
from benchmarks.side_by_side.laws import Laws
from benchmarks.side_by_side.own_tests import OwnTests
from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.plugin import NO_FAULT

RECORD: Final = Path(__file__).parent / "results.jsonl"


def lines(
    file: str = str(RECORD), pattern: str = "*", shard: tuple[int, int] = (1, 1), folder: str = ""
) -> Iterator[str]:
    """A line for each row as it comes, then the table of all that FILE holds; without DIR none of PyTorch's tests."""
    kept = Kept(file, "fault", "arm")
    mine = [*ALL][shard[0] - 1 :: shard[1]]
    for arm, row in _rows(kept, mine, pattern, folder):
        row = {name: _without_folders(value) if isinstance(value, str) else value for name, value in row.items()}
        kept.add({"fault": row.pop("fault"), "arm": arm, "commit": revision(), **row})
        yield f"{kept.rows[-1]['fault']}, {arm}: {table.cell(kept.rows[-1])}"
    yield from table.table(kept.rows)


def _without_folders(text: str) -> str:
    """Files by their names: a record says nothing of the machine."""
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/", "", text)


def _rows(kept: Kept, faults: list[str], pattern: str, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(arm, row) of what is not kept yet."""

    def left(arm: str) -> list[str]:
        asked = [name for name in faults if fnmatchcase(name, pattern) or fnmatchcase(f"{name}:{arm}", pattern)]
        return [name for name in asked if (name, arm) not in kept]

    for side in SIDES:
        names = [name for name in left("tests") if name in side.mechanisms]
        if names and (folder or side.subject != "fully_shard"):
            yield from _of_tests(kept, OwnTests(side.subject, folder), names)
    if names := left("DETAIL"):
        with closing(Peers()) as peers:
            for name in names:
                yield from ((arm, {"fault": name, **answer}) for arm, answer in peers.answers(ALL[name]).items())
    with closing(Laws()) as laws:
        for name in left("laws"):
            yield "laws", {"fault": name, **laws.answer(ALL[name])}


def _of_tests(kept: Kept, own: OwnTests, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    without = f"tests of {own.side}"
    baseline = {(row["fault"], row["arm"]): row for row in kept.rows}.get((NO_FAULT, without), {})
    for row in own.rows(names, baseline):
        yield without if row["fault"] == NO_FAULT else "tests", row
