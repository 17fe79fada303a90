"""Which law kills which fault: for people, as Markdown, and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.report.colour import Paint
from fsdpcheck.report.table import aligned
from fsdpcheck.studies.faults.matrix import OUTCOMES, Outcome, Row, counts

SCHEMA: Final = 1
_COLOURS: Final[Mapping[Outcome, str]] = {"killed": "green", "survived": "red", "raises at once": "yellow"}
_SHOWN: Final = ("survived", "changes nothing", "never ran", "not asked")
"""Outcomes of which each fault is named."""


def progress(row: Row, number: int, total: int) -> str:
    """A line as a fault is done."""
    by = (
        f" by {row.kills[0].law} on {row.kills[0].adapter}, {_some(row.cases, 'case')}"
        if row.kills
        else f", {_some(row.cases, 'case')}"
    )
    return f"{number}/{total} {row.fault}: {row.outcome}{by}"


def text(rows: Sequence[Row], paint: Paint, equivalent: Mapping[str, str]) -> str:
    """How many became what; each that was not killed, with what it is; the laws that kill, if all were asked."""
    parts = []
    for outcome in _SHOWN:
        mine = [row for row in rows if row.outcome == outcome]
        if mine:
            parts.append(f"{paint(outcome, _COLOURS.get(outcome, 'bold'))}: {OUTCOMES[outcome]}")
            parts += [_told(row, equivalent) for row in mine]
    if laws := kills_by_law(rows):
        told = [("law", "kills", "alone"), *((law, str(kills), str(only)) for law, kills, only in laws)]
        parts.append(aligned(told, paint, (1, 2)))
    parts.append(summary(rows, equivalent))
    return "\n\n".join(parts)


def summary(rows: Sequence[Row], equivalent: Mapping[str, str]) -> str:
    """Counts of outcomes; of those that take effect and are not written down as equivalent, the share killed."""
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts(rows).items() if count)
    killed = sum(row.outcome == "killed" for row in rows)
    left = killed + sum(row.outcome == "survived" and row.fault not in equivalent for row in rows)
    share = f"; of {left} that take effect {killed} are killed ({_per_cent(killed, left)})" if left else ""
    reasons = sum(row.outcome == "survived" and row.fault in equivalent for row in rows)
    told += f"; {reasons} of the survivors are written down as equivalent" * bool(reasons)
    stale = sorted(row.fault for row in rows if row.outcome == "killed" and row.fault in equivalent)
    told += f"; written down as equivalent and killed: {', '.join(stale)}" * bool(stale)
    return f"{len(rows)} faults: {told}{share}"


def data(rows: Sequence[Row], options: Mapping[str, Any], equivalent: Mapping[str, str]) -> dict[str, Any]:
    """The same as JSON data; docs/reports.md says what each field is."""
    return {
        "schema": SCHEMA, "release": __version__, "options": dict(options), "counts": dict(counts(rows)),
        "rows": [{**row.to_data(), "equivalent": equivalent.get(row.fault, "")} for row in rows],
    }  # fmt: skip


def markdown(rows: Sequence[Row], equivalent: Mapping[str, str]) -> str:
    """The same as a document: the counts, what is left, and a row a fault."""
    lines = ["# Faults and laws", "", summary(rows, equivalent) + ".", ""]
    lines += ["| fault | what it is | outcome | killed by | cases |", "|---|---|---|---|---|"]
    for row in rows:
        reasoned = row.fault in equivalent and row.outcome != "killed"
        outcome = f"equivalent: {equivalent[row.fault]}" if reasoned else row.outcome
        laws = ", ".join(dict.fromkeys(kill.law for kill in row.kills)) or "-"
        cells = (f"`{row.fault}`", row.says, outcome, laws, str(row.cases))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def alone(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Law -> the faults that it kills and no other law does; of rows for which every law was asked."""
    found: dict[str, list[str]] = {}
    for row in rows:
        laws = {kill.law for kill in row.kills}
        if len(laws) == 1:
            found.setdefault(laws.pop(), []).append(row.fault)
    return found


def kills_by_law(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """(law, how many it kills, how many it alone kills); none where the first kill ended each row."""
    if not any(len(row.kills) > 1 for row in rows):
        return []
    only = alone(rows)
    killers = Counter(kill.law for row in rows for kill in row.kills)
    return [(law, count, len(only.get(law, ()))) for law, count in killers.items()]


def _told(row: Row, equivalent: Mapping[str, str]) -> str:
    where = f"  {row.where}" if row.where else ""
    lines = [
        f"  {row.fault}{where}",
        f"    {row.says}",
        f"    asked: {_some(row.laws, 'law')}, {_some(row.cases, 'case')}",
    ]
    lines += [f"    equivalent: {equivalent[row.fault]}"] if row.fault in equivalent else []
    lines += [f"    {row.note}"] if row.note else []
    return "\n".join(lines)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _per_cent(part: int, whole: int) -> str:
    """Never rounded up to all or down to none."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f} %"
