"""The table adapter x law, and the line that sums it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from fsdpcheck.errors import HOLDS
from fsdpcheck.ledger import Ledger
from fsdpcheck.report.colour import Paint
from fsdpcheck.verdict import Verdict

_HEAD = ("adapter", "law", "verdict", "cases", "rejected", "time", "")
_RIGHT = {3, 4, 5}
_COLOURS = {"holds": "green", "finding": "red", "not promised": "yellow", "no case": "red", "error": "red"}


def table(ledger: Ledger, paint: Paint) -> str:
    """One row a verdict; rows not reached say so. A law that is not promised shows the reason and no numbers."""
    rows = [_row(ledger, adapter, law) for adapter in ledger.plan.adapters for law in ledger.laws]
    if not rows:
        return ""
    return aligned([_HEAD, *rows], paint)


def summary(ledger: Ledger) -> str:
    """The session in one line."""
    verdicts = list(ledger.verdicts.values())
    counts = Counter(verdict.status for verdict in verdicts)
    parts = [f"{counts['holds']} checks hold", _findings(ledger)]
    parts += [f"{counts[status]} {status}" for status in ("error", "no case", "not promised") if counts[status]]
    left = ledger.total - len(verdicts)
    parts += [f"{left} not reached"] if left else []
    cases, rejected = sum(verdict.cases for verdict in verdicts), sum(verdict.rejected for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    return f"{', '.join(parts)}; {cases} distinct cases judged, {rejected} rejected as not exact, {seconds:.1f} s"


def aligned(rows: Sequence[Sequence[str]], paint: Paint, right: Container[int] = _RIGHT) -> str:
    """Rows in columns, those numbered in ``right`` flush right; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if number == 0:
            cells = [paint(cell, "bold") for cell in cells]
        elif row[2] in _COLOURS:
            cells[2] = paint(cells[2], _COLOURS[row[2]])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(ledger: Ledger, adapter: str, law: str) -> tuple[str, ...]:
    verdict = ledger.verdicts.get((law, adapter))
    if verdict is None:
        return (adapter, law, "not reached", "-", "-", "-", "")
    if verdict.status == "not promised":
        return (adapter, law, verdict.status, "-", "-", "-", verdict.reason)
    return (
        adapter,
        law,
        verdict.status,
        str(verdict.cases),
        str(verdict.rejected),
        f"{verdict.seconds:.1f} s",
        _note(verdict),
    )


def _note(verdict: Verdict) -> str:
    if verdict.finding is not None:
        return verdict.finding.what
    lines = verdict.reason.splitlines()
    return "" if not lines else lines[0] if verdict.exit_code == HOLDS else "see below"


def _findings(ledger: Ledger) -> str:
    findings = ledger.findings
    if not findings:
        return "0 findings"
    roots = len({finding.root for finding in findings})
    return f"{len(findings)} finding{'s' * (len(findings) > 1)} of {roots} root{'s' * (roots > 1)}"
