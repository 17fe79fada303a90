"""The table of docs/side-by-side.md: a row a fault, a column an arm, and the sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from benchmarks.side_by_side.faults import ALL, SIDES

ARMS: Final = {"tests": "its own tests", "DETAIL": "gloo, DETAIL", "allclose": "`allclose`", "laws": "fsdpcheck"}
"""Arm -> its column."""
Rows = list[dict[str, Any]]


def table(rows: Rows) -> Iterator[str]:
    """For each side its faults that all arms have judged, then how many of each answer there are."""
    found = {(row["fault"], row["arm"]): row for row in rows}
    for side in SIDES:
        judged = [name for name in side.mechanisms if all((name, arm) in found for arm in ARMS)]
        yield from ("", f"### {side.subject} ({len(judged)} of {len(side.mechanisms)} judged)", "")
        yield f"| fault | stands for | {' | '.join(ARMS.values())} |"
        yield "|" + " --- |" * (2 + len(ARMS))
        for name in judged:
            cells = [cell(found[name, arm]) for arm in ARMS]
            yield f"| `{name}`: {ALL[name].what} | {ALL[name].source} | {' | '.join(cells)} |"
    yield from sums(rows)


def sums(rows: Rows) -> Iterator[str]:
    """Of the faults that all arms have judged."""
    found = {(row["fault"], row["arm"]): row["answer"] for row in rows if row["fault"] in ALL}
    yield from ("", "### Sums", "", "| of | arm | found | missed | not executed |", "| --- | --- | --- | --- | --- |")
    for side in SIDES:
        judged = [name for name in side.mechanisms if all((name, arm) in found for arm in ARMS)]
        for arm, column in ARMS.items():
            answers = [found[name, arm] for name in judged]
            counts = [answers.count(answer) for answer in ("found", "missed", "not executed")]
            yield f"| {side.subject} ({len(judged)}) | {column} | {' | '.join(map(str, counts))} |"


def cell(row: dict[str, Any]) -> str:
    """The answer of an arm in a few words; of tests without a fault, how many came to what."""
    if "passed" in row:
        skipped = sum(map(len, row["skipped"].values()))
        left = f"{skipped} skipped, {len(row['failed'])} failed, {len(row['too slow'])} too slow"
        return f"{len(row['passed'])} passed, {left}"
    by = f" (`{row['by'].rpartition('::')[2]}`)" if row["by"] and row["by"] != "exception" else ""
    if row["by"] == "exception":
        by = " (exception)"
    if row["arm"] == "tests":
        by += f", {row['executing']} execute it" if row["answer"] == "missed" else ""
    if row["arm"] == "laws" and row["answer"] == "missed":
        by = f": {row['outcome']}"
    return f"{row['answer']}{by}"
