"""SARIF 2.1.0 of a session: a law is a rule, a finding a result at the user's file and line.

After "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", OASIS Standard, 2020.
"""

from __future__ import annotations

import dataclasses
import hashlib
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote

from fsdpcheck import __version__
from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.report.finding import replay_command
from fsdpcheck.report.forms import places
from fsdpcheck.session.ledger import Ledger

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT: Final = "%SRCROOT%"
_QUIET: Final = ("holds", "finding", "not promised", "not asked")
"""Statuses that are no trouble of the session itself."""


def document(ledger: Ledger, root: str = "") -> dict[str, Any]:
    """The session as JSON data. What is no finding and no pass is a notification, and then it was no success."""
    ledger = shown(ledger)
    rules = {law: number for number, law in enumerate(ledger.laws)}
    results = [
        _result(finding, number, ledger, rules, root)
        for number, group in enumerate(grouped(ledger.findings), 1)
        for finding in group
    ]
    driver = {"name": "fsdpcheck", "version": __version__, "rules": [_rule(law, ledger) for law in ledger.laws]}
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(ledger, rules)],
        "originalUriBaseIds": {_ROOT: {"description": {"text": "the folder in which the session ran"}}},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"plan": dataclasses.asdict(ledger.plan), "versions": ledger.versions},
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(law: str, ledger: Ledger) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": law, "defaultConfiguration": {"level": "error"}}
    if guarantee := ledger.guarantees.get(law, ""):
        rule |= {"shortDescription": {"text": guarantee}, "help": {"text": f"`fsdpcheck list laws {law}` states it."}}
    return rule | {"properties": {"tags": [law.partition(".")[0]]}}


def _result(finding: Finding, root_number: int, ledger: Ledger, rules: dict[str, int], root: str) -> dict[str, Any]:
    place = places.of_finding(finding, ledger, root)
    known = {"adapter": finding.adapter, "root": root_number, "kind": finding.kind, "token": finding.token}
    result: dict[str, Any] = {
        "ruleId": finding.law,
        "level": "error",
        "kind": "fail",
        "message": {"text": _message(finding, ledger)},
        "locations": [_location(finding, place)],
        "partialFingerprints": {"fsdpcheck/v1": _fingerprint(finding)},
        "properties": {
            **known,
            "case": dict(finding.case),
            "confirmed": finding.confirmed,
            "confirmed_on": [*finding.confirmed_on],
        },
    }
    if finding.law in rules:
        result["ruleIndex"] = rules[finding.law]
    if waiver := ledger.waived.get(finding.token):
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": waiver}]
    return result


def _location(finding: Finding, place: places.Place | None) -> dict[str, Any]:
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": finding.adapter}]}
    if place is not None:
        inside = not PurePath(place.file).is_absolute()
        artifact = {"uri": quote(place.file) if inside else f"file://{quote(place.file)}"}
        physical: dict[str, Any] = {"artifactLocation": artifact | ({"uriBaseId": _ROOT} if inside else {})}
        if place.line is not None:
            physical["region"] = {"startLine": max(place.line, 1)}
        location["physicalLocation"] = physical
    return location


def _message(finding: Finding, ledger: Ledger) -> str:
    lines = [f"{finding.adapter} breaks {finding.law}: {finding.what}", f"got: {finding.got}"]
    lines += [f"wanted: {finding.wanted}", f"where: {finding.where}"]
    lines += [f"probably: {finding.cause}"] if finding.cause else []
    return "\n".join(
        [*lines, f"in the case {finding.words}", replay_command(finding, ledger.plan.installs, ledger.folder)]
    )


def _fingerprint(finding: Finding) -> str:
    """The same for the same defect in a later session, as far as its law, what broke and its cause tell."""
    told = "\n".join((finding.law, finding.adapter, finding.kind, finding.what, finding.quantity))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _invocation(ledger: Ledger, rules: dict[str, int]) -> dict[str, Any]:
    troubles = [_trouble(verdict, rules) for verdict in ledger.verdicts.values() if verdict.status not in _QUIET]
    troubles += [{"level": "error", "message": {"text": text}} for text, _ in ledger.errors]
    unreached = ledger.total - len(ledger.verdicts)
    if unreached:
        troubles.append({"level": "error", "message": {"text": f"{unreached} laws were not reached"}})
    found: dict[str, Any] = {
        "executionSuccessful": not troubles and not ledger.interrupted,
        "exitCode": ledger.exit_code,
        "toolExecutionNotifications": troubles,
    }
    if ledger.began:
        began = datetime.fromisoformat(ledger.began).astimezone(UTC)
        found["startTimeUtc"] = began.strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def _trouble(verdict: Verdict, rules: dict[str, int]) -> dict[str, Any]:
    told = f"{verdict.status}: {verdict.law} on {verdict.adapter}: {verdict.reason}"
    trouble: dict[str, Any] = {"level": "error", "message": {"text": told}}
    if verdict.law in rules:
        trouble["associatedRule"] = {"id": verdict.law, "index": rules[verdict.law]}
    return trouble
