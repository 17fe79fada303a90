"""Annotations of a GitHub workflow: a line for each finding and each error, at the user's file and line."""

from __future__ import annotations

from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import NOT_CHECKED, Finding
from fsdpcheck.report import waivers
from fsdpcheck.report.finding import replay_command
from fsdpcheck.report.forms import places
from fsdpcheck.session.ledger import Ledger

_TROUBLES = ("error", "no case", "too few cases", "not supported")


def lines(ledger: Ledger, root: str = "") -> list[str]:
    """Workflow commands, one a root of findings, then one a verdict that is neither a pass nor a finding."""
    ledger = shown(ledger)
    found = [_finding(group, ledger, root) for group in grouped(ledger.findings)]
    for verdict in ledger.verdicts.values():
        if verdict.status in _TROUBLES and not verdict.reason.startswith(NOT_CHECKED):
            title = f"fsdpcheck: {verdict.status}: {verdict.law} on {verdict.adapter}"
            found.append(command("error", verdict.reason, title, places.of_adapter(verdict.adapter, ledger, root)))
    found += [command("error", text, "fsdpcheck") for text, _ in ledger.errors]
    unreached = ledger.total - len(ledger.verdicts)
    if unreached:
        found.append(command("error", f"{unreached} checks were not reached", "fsdpcheck"))
    return found


def command(kind: str, message: str, title: str, place: places.Place | None = None) -> str:
    """One workflow command, whatever the texts hold; GitHub says how to escape in actions/toolkit, core/command."""
    known = {"title": title}
    if place is not None:
        known |= {"file": place.file} | ({} if place.line is None else {"line": str(place.line)})
    said = ",".join(f"{name}={_property(value)}" for name, value in known.items())
    return f"::{kind} {said}::{_data(message)}"


def _finding(group: list[Finding], ledger: Ledger, root: str) -> str:
    first, *others = group
    told = [first.what, f"got: {first.got}", f"wanted: {first.wanted}", f"where: {first.where}"]
    told += [f"probably: {first.cause}"] if first.cause else []
    told += [f"also broken: {', '.join(other.law for other in others)}"] if others else []
    told += [replay_command(first, ledger.plan.installs, ledger.folder)]
    title = f"fsdpcheck: {first.adapter} breaks {first.law}"
    if waived := waivers.of_root(group, ledger):
        told.append(f"waived: {waived}")
    kind = "warning" if all(one.token in ledger.waived for one in group) else "error"
    return command(kind, "\n".join(told), title, places.of_finding(first, ledger, root))


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
