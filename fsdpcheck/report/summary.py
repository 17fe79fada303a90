"""How a session ends on paper: the table, the findings by root, what went wrong, one line that sums it up."""

from __future__ import annotations

from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings import roots
from fsdpcheck.findings.verdict import NOT_CHECKED
from fsdpcheck.report import bounds, conditions, finding, table, unjudged_cases, waivers
from fsdpcheck.report.colour import Paint
from fsdpcheck.session.ledger import Ledger


def ending(ledger: Ledger, paint: Paint, verbose: bool = False) -> str:
    """All that ``fsdpcheck run`` prints on stdout; of what others wrote nothing that a terminal obeys.

    ``verbose``: a row a law, in the place of a line a chapter. Findings and errors are in full in both.
    """
    ledger = shown(ledger)
    parts = ["\n".join(ledger.notes), (table.table if verbose else table.by_chapter)(ledger, paint)]
    parts += conditions.sentences(verdict.law for verdict in ledger.verdicts.values() if verdict.cases)
    groups = roots.grouped(ledger.findings)
    parts += [
        finding.render(group, number, paint, ledger.plan.installs, ledger.folder)
        for number, group in enumerate(groups, 1)
    ]
    parts += finding.troubles(
        verdict
        for verdict in ledger.verdicts.values()
        if verdict.status in ("error", "no case", "too few cases", "not supported")
        and not verdict.reason.startswith(NOT_CHECKED)
    )
    parts += [paint(sentence, "yellow") for sentence in waivers.sentences(ledger)]
    parts += [f"ERROR: {text}" for text, _ in ledger.errors]
    parts += [
        bounds.of_session(ledger),
        table.left(ledger),
        unjudged_cases.of_session(ledger),
        table.undrawn(ledger),
        table.unaccepted(ledger, verbose),
    ]
    if ledger.laws:
        parts.append(("interrupted: " if ledger.interrupted else "") + table.summary(ledger))
    return "\n\n".join(part for part in parts if part)
