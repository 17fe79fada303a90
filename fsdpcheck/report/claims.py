"""The claims ledger as a table for people, as Markdown, and as data."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from fsdpcheck.report.colour import Paint

_TITLES = {
    "A": "Norm aggregation",
    "B": "Sharding and padding",
    "C": "Deferred norms",
    "D": "FSDP2 features, on `fully_shard`",
    "E": "Kernels",
}
_COLOURS = {"holds": "green", "refuted": "red", "error": "red"}
_WIDTH = 116


class Row(Protocol):
    """What is shown of a claims.judging.Row."""

    @property
    def id(self) -> str: ...
    @property
    def statement(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def measured(self) -> str: ...


def text(rows: Sequence[Row], paint: Paint) -> str:
    """Each row: its id, the claim, the verdict, what was measured; then how many of each verdict there are."""
    return "\n".join([*(_row(row, paint) for row in rows), _summary(rows)])


def data(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The same as JSON data."""
    return [{"id": row.id, "claim": row.statement, "verdict": row.verdict, "measured": row.measured} for row in rows]


def markdown(rows: Sequence[Row]) -> str:
    """The same as a document, a table a section."""
    parts = [
        "# The claims ledger\n\nWritten by `fsdpcheck claims --markdown docs/claims.md`: what is said about sharded"
        " per-sample gradient norms,\nFSDP padding, deferred norms and FSDP2, each row measured on simulated ranks,"
        " on a"
        " CPU. `fsdpcheck claims A1` measures one row again.\nA verdict follows from the numbers beside it; no time is"
        f" measured on a CPU.\n\n{_summary(rows)}.\n"
    ]
    for section in dict.fromkeys(row.id[0] for row in rows):
        head = "| id | claim | verdict | measured |\n|---|---|---|---|"
        parts.append(f"## {section}. {_TITLES.get(section, '')}\n\n{head}")
        cells = ((row.id, row.statement, f"*{row.verdict}*", row.measured) for row in rows if row.id[0] == section)
        parts.append("".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in cells))
    return "\n".join(parts)


def _row(row: Row, paint: Paint) -> str:
    colour = _COLOURS.get(row.verdict, "yellow")
    lines = textwrap.wrap(row.statement, _WIDTH - 5)
    measured = textwrap.wrap(row.measured, _WIDTH - 5)
    head = f"{paint(row.id.ljust(4), 'bold')} {lines[0]}"
    return "\n".join([head, *_indented(lines[1:]), f"     {paint(row.verdict, colour)}", *_indented(measured)]) + "\n"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"     {line}" for line in lines]


def _summary(rows: Sequence[Row]) -> str:
    counts = Counter("holds only if" if row.verdict.startswith("holds only if") else row.verdict for row in rows)
    return f"{len(rows)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
