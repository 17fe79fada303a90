"""JUnit XML of a session: one suite an adapter, one case a law. What else is known is in properties, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.report.colour import uncoloured
from fsdpcheck.report.finding import render
from fsdpcheck.report.forms import places
from fsdpcheck.session.ledger import Ledger

_SKIPPED: Final = ("not promised", "not asked")
_UNREACHED: Final = "the session ended before this law was judged"


def text(ledger: Ledger, root: str = "") -> str:
    """The session as XML. A law that was not reached is an error, never a pass."""
    ledger = shown(ledger)
    whole = Element("testsuites", {"name": "fsdpcheck"})
    for adapter in ledger.plan.adapters:
        _suite(whole, ledger, adapter, root)
    if ledger.errors:
        _errors(whole, ledger)
    _count(whole, [*whole.iter("testcase")])
    del whole.attrib["skipped"]  # which Jenkins' schema has of a suite, and not of the whole
    ElementTree.indent(whole)
    return ElementTree.tostring(whole, encoding="unicode", xml_declaration=True) + "\n"


def _suite(whole: Element, ledger: Ledger, adapter: str, root: str) -> None:
    suite = SubElement(whole, "testsuite", {"name": adapter})
    if ledger.began:
        suite.set("timestamp", ledger.began)
    plan = ledger.plan
    _properties(
        suite,
        {"fsdpcheck.versions": ledger.versions, "fsdpcheck.profile": plan.profile, "fsdpcheck.engine": plan.engine,
         "fsdpcheck.seed": plan.seed, "fsdpcheck.unaccepted": ledger.unaccepted.get(adapter, [])},
    )  # fmt: skip
    for law in ledger.laws:
        _case(suite, ledger, law, ledger.verdicts.get((law, adapter)), adapter, root)
    _count(suite, [*suite.iter("testcase")])


def _case(suite: Element, ledger: Ledger, law: str, verdict: Verdict | None, adapter: str, root: str) -> None:
    case = SubElement(suite, "testcase", {"classname": f"{adapter}.{law.partition('.')[0]}", "name": law})
    case.set("time", f"{verdict.seconds if verdict is not None else 0:.3f}")
    if verdict is None:
        SubElement(case, "error", {"message": _UNREACHED, "type": "not reached"})
        return
    findings = verdict.findings
    place = places.of_finding(findings[0], ledger, root) if findings else places.of_adapter(adapter, ledger, root)
    if place is not None:
        case.set("file", place.file)
        if place.line is not None:
            case.set("line", str(place.line))
    _properties(case, _known(ledger, verdict))
    whole = all(finding.token in ledger.waived for finding in findings)  # a case has one outcome
    for number, finding in enumerate(findings[:1] if whole else findings, 1):
        said = {"message": _head(finding), "type": finding.kind}
        if whole:
            said = {"message": f"waived: {ledger.waived[finding.token]}", "type": "waived"}
        failure = SubElement(case, "skipped" if whole else "failure", said)
        failure.text = render([finding], number, uncoloured, ledger.plan.installs, ledger.folder)
    if not findings and verdict.status != "holds":
        said = {"message": verdict.reason.partition("\n")[0] or verdict.status, "type": verdict.status}
        told = SubElement(case, "skipped" if verdict.status in _SKIPPED else "error", said)
        told.text = verdict.reason


def _known(ledger: Ledger, verdict: Verdict) -> dict[str, Any]:
    """What is known of a verdict, by the name of its property."""
    known = {
        "status": verdict.status,
        "guarantee": ledger.guarantees.get(verdict.law, ""),
        "cases": verdict.cases,
        "rejected": verdict.rejected,
        "census": dict(verdict.census),
        "undrawn": list(verdict.undrawn),
        "never": list(verdict.never),
        "findings": [_finding(finding) for finding in verdict.findings],
        "waived": [waiver for one in verdict.findings if (waiver := ledger.waived.get(one.token, ""))],
    }
    return {f"fsdpcheck.{name}": value for name, value in known.items() if value not in ("", [], {})}


def _finding(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in ("what", "got", "wanted", "where", "cause", "token", "case")}


def _head(finding: Finding) -> str:
    return f"{finding.what}; {finding.where}" + (f"; probably: {finding.cause}" if finding.cause else "")


def _errors(whole: Element, ledger: Ledger) -> None:
    """What ended the session early, as a suite of its own: without it a reader sees a shorter, green run."""
    suite = SubElement(whole, "testsuite", {"name": "session"})
    for number, (told, code) in enumerate(ledger.errors, 1):
        case = SubElement(suite, "testcase", {"classname": "session", "name": f"error {number}", "time": "0.000"})
        said = {"message": told.partition("\n")[0], "type": f"exit code {code}"}
        SubElement(case, "error", said).text = told
    _count(suite, [*suite.iter("testcase")])


def _properties(parent: Element, known: Mapping[str, Any]) -> None:
    """Each value is JSON, strings as well, so that a reader knows what to do with all of them."""
    listed = SubElement(parent, "properties")
    for name, value in known.items():
        SubElement(listed, "property", {"name": name, "value": json.dumps(value, sort_keys=True)})


def _count(of: Element, cases: list[Element]) -> None:
    of.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        of.set(name, str(sum(case.find(tag) is not None for case in cases)))
    of.set("time", f"{sum(_seconds(cases)):.3f}")


def _seconds(cases: list[Element]) -> Iterator[float]:
    return (float(case.get("time", "0")) for case in cases)
