"""Forms of a report: each says what the session says, for other programs, whatever an adapter says in it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import jsonschema
import pytest

from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report import summary
from fsdpcheck.report.chapters import headline
from fsdpcheck.report.colour import uncoloured
from fsdpcheck.report.forms import github, junit, markdown, places, sarif
from fsdpcheck.report.page import view
from fsdpcheck.session.ledger import Ledger
from tests.common import sessions
from tests.common.tables import each

EVERY: Final = [sessions.mixed, sessions.large, sessions.hostile]

COUNTS = {"tests", "failures", "errors", "skipped", "time"}
XUNIT: Final = {
    "testsuites": ({"name", *COUNTS} - {"skipped"}, {"testsuite"}),
    "testsuite": ({"name", "timestamp", *COUNTS}, {"properties", "testcase"}),
    "testcase": (
        {"classname", "name", "time", "file", "line"},
        {"properties", "failure", "error", "skipped"},
    ),
    "properties": (set(), {"property"}),
    "property": ({"name", "value"}, set()),
    "failure": ({"message", "type"}, set()),
    "error": ({"message", "type"}, set()),
    "skipped": ({"message", "type"}, set()),
}
"""Element -> (attributes, children) that readers of JUnit know of it: those of junit-10.xsd of Jenkins' xUnit plugin.

Beyond that schema are properties, file and line of a case, which pytest's family xunit1 writes too.
"""


@each("made", EVERY)
def test_junit_has_the_elements_and_counts_that_readers_know(made: Callable[[], Ledger]) -> None:
    ledger = made()
    whole = ElementTree.fromstring(junit.text(ledger).encode())
    assert strangers(whole) == []
    cases = [*whole.iter("testcase")]
    assert len(cases) == ledger.total + len(ledger.errors) == int(whole.get("tests", ""))
    for suite in (whole, *whole.iter("testsuite")):
        mine = [*suite.iter("testcase")]
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            known = suite.tag == "testsuites" and name == "skipped"  # which is of suites alone
            assert known or int(suite.get(name, "-1")) == sum(case.find(tag) is not None for case in mine)


def test_a_waived_finding_is_no_failure_and_says_who_lives_with_it() -> None:
    found, words = sessions.finding(), "training.* on mine, until 2027-01-31: issue 7 (the team)"
    broken = Verdict("training.plain", sessions.MINE, "finding", 3, finding=found, exit_code=1)
    ledger = sessions.ledger([broken, Verdict("norms.sum", sessions.MINE, "holds", 3)])
    assert (ledger.exit_code, headline(ledger)) == (1, "1 defect found")
    ledger.waived = {found.token: words}
    assert (ledger.exit_code, headline(ledger)) == (0, "Every promised law holds but for what is waived")
    assert f"WAIVED: 1 finding: {words}" in summary.ending(ledger, uncoloured)
    case = next(one for one in ElementTree.fromstring(junit.text(ledger).encode()).iter("testcase"))
    assert [child.tag for child in case] == ["properties", "skipped"]
    assert (case.find("skipped") or case[1]).get("message") == f"waived: {words}"
    (result,) = sarif.document(ledger)["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "status": "accepted", "justification": words}]
    (line,) = (line for line in github.lines(ledger) if "training.plain" in line)
    assert line.startswith("::warning ")
    assert "- **waived**: training" in markdown.text(ledger)
    (shown,) = view.findings(ledger, "")
    assert ("waived", words) in shown.facts


def test_a_root_that_is_waived_in_part_says_what_is_not() -> None:
    mine, other = sessions.finding(), dataclasses.replace(sessions.finding("training.gradients"), token="v2:other")
    verdicts = [Verdict(one.law, sessions.MINE, "finding", 3, finding=one, exit_code=1) for one in (mine, other)]
    ledger = sessions.ledger(verdicts)
    for waived, red in ((mine, other), (other, mine)):
        ledger.waived = {waived.token: "the waiver"}
        words = f"the waiver; not waived: {red.law}"
        assert ledger.exit_code == 1
        assert words in markdown.text(ledger).replace("\\", "")
        (shown,) = view.findings(ledger, "")
        assert ("waived", words) in shown.facts
        (line,) = (line for line in github.lines(ledger) if "breaks" in line)
        assert (line.startswith("::error "), words in line) == (True, True)


def strangers(whole: ElementTree.Element) -> list[str]:
    """Elements and attributes that no reader of JUnit knows."""
    found = []
    for element in whole.iter():
        attributes, children = XUNIT.get(element.tag, (set(), set()))
        found += [f"{element.tag}/@{name}" for name in {*element.keys()} - attributes]
        found += [f"{element.tag}/{child.tag}" for child in element if child.tag not in children]
    return found


@pytest.mark.skipif("JUNIT_SCHEMA" not in os.environ, reason="JUNIT_SCHEMA names no file with junit-10.xsd")
@each("made", EVERY)
def test_junit_is_valid_by_the_schema_of_jenkins_but_for_what_pytest_writes_too(made: Callable[[], Ledger]) -> None:
    schema = pytest.importorskip("xmlschema").XMLSchema(os.environ["JUNIT_SCHEMA"])
    whole = ElementTree.fromstring(junit.text(made()).encode())
    beyond = [error.reason for error in schema.iter_errors(whole)]
    for case in whole.iter("testcase"):
        for properties in case.findall("properties"):
            case.remove(properties)
        for name in ("file", "line"):
            case.attrib.pop(name, None)
    assert [error.reason for error in schema.iter_errors(whole)] == []
    assert beyond, "a schema that knows properties of a case leaves nothing out: leave nothing out here"
    whole.set("strange", "1")
    assert not schema.is_valid(whole)


def test_a_stranger_in_junit_is_noticed() -> None:
    text = junit.text(sessions.mixed()).replace("<properties>", '<properties strange="1"><strange/>', 1)
    assert strangers(ElementTree.fromstring(text.encode())) == ["properties/@strange", "properties/strange"]


def test_a_law_that_was_not_judged_is_no_pass_in_junit() -> None:
    whole = ElementTree.fromstring(junit.text(sessions.mixed()).encode())
    told = {
        case.get("name"): [child.tag for child in case if child.tag != "properties"] for case in whole.iter("testcase")
    }
    assert told == {
        "norms.sum": [],
        "norms.mixed": ["skipped"],
        "state.saved": ["error"],
        "state.shape": ["skipped"],
        "training.plain": ["failure", "failure"],
        "training.gradients": ["failure"],
        "zero.unreached": ["error"],
    }


def test_properties_of_junit_are_json() -> None:
    whole = ElementTree.fromstring(junit.text(sessions.mixed()).encode())
    case = next(one for one in whole.iter("testcase") if one.get("name") == "training.plain")
    assert (case.get("file"), case.get("line")) == ("train.py", "20")
    known = {one.get("name"): json.loads(one.get("value", "")) for one in case.iter("property")}
    assert known["fsdpcheck.census"]["W=1"] == 8
    first, second = known["fsdpcheck.findings"]
    assert first["case"] == json.loads(sessions.CASE.to_json())
    assert (first["token"], second["got"]) == (sessions.finding().token, "7.0")


SARIF: Final = {
    "type": "object",
    "required": ["$schema", "version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": {"$ref": "#/$defs/run"}},
    },
    "$defs": {
        "message": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}},
        "run": {
            "type": "object",
            "required": ["tool", "results", "invocations"],
            "additionalProperties": False,
            "properties": {
                "tool": {"type": "object", "required": ["driver"]},
                "originalUriBaseIds": {"type": "object"},
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "properties": {"type": "object"},
                "invocations": {"type": "array", "items": {"$ref": "#/$defs/invocation"}},
                "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
            },
        },
        "invocation": {
            "type": "object",
            "required": ["executionSuccessful"],
            "additionalProperties": False,
            "properties": {
                "executionSuccessful": {"type": "boolean"},
                "exitCode": {"type": "integer"},
                "startTimeUtc": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
                "toolExecutionNotifications": {"type": "array", "items": {"required": ["message"]}},
            },
        },
        "result": {
            "type": "object",
            "required": ["message", "ruleId", "locations"],
            "additionalProperties": False,
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer", "minimum": 0},
                "level": {"enum": ["none", "note", "warning", "error"]},
                "kind": {"enum": ["notApplicable", "pass", "fail", "review", "open", "informational"]},
                "message": {"$ref": "#/$defs/message"},
                "locations": {"type": "array", "items": {"$ref": "#/$defs/location"}},
                "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
                "properties": {"type": "object"},
            },
        },
        "location": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "logicalLocations": {"type": "array"},
                "physicalLocation": {
                    "type": "object",
                    "properties": {
                        "artifactLocation": {"required": ["uri"], "properties": {"uri": {"format": "uri-reference"}}},
                        "region": {"properties": {"startLine": {"type": "integer", "minimum": 1}}},
                    },
                },
            },
        },
    },
}
"""What of SARIF 2.1.0 is used, in our own words, and nothing beside it. The whole one is OASIS'; see the next test."""


@each("made", EVERY)
def test_sarif_is_of_the_form_that_is_used(made: Callable[[], Ledger]) -> None:
    assert [error.message for error in jsonschema.Draft202012Validator(SARIF).iter_errors(written(made()))] == []


@pytest.mark.skipif("SARIF_SCHEMA" not in os.environ, reason="SARIF_SCHEMA names no file with the schema of OASIS")
@each("made", EVERY)
def test_sarif_is_valid_by_the_schema_of_oasis(made: Callable[[], Ledger]) -> None:
    schema = json.loads(Path(os.environ["SARIF_SCHEMA"]).read_text(encoding="utf-8"))
    valid = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in valid.iter_errors(written(made()))] == []
    assert not valid.is_valid({**written(made()), "version": "2.2.0"})


def test_a_wrong_sarif_is_noticed() -> None:
    for change in ({"level": "bad"}, {"strange": 1}, {"message": {"text": ""}}, {"locations": [{"physical": {}}]}):
        data = written(sessions.mixed())
        data["runs"][0]["results"][0].update(change)
        assert not jsonschema.Draft202012Validator(SARIF).is_valid(data), change


def written(ledger: Ledger) -> Any:
    return json.loads(json.dumps(sarif.document(ledger)))


def test_sarif_names_each_finding_at_the_users_line_and_no_success_where_something_is_undecided() -> None:
    (run,) = written(sessions.mixed())["runs"]
    places = [
        (
            one["ruleId"],
            one["locations"][0]["physicalLocation"].get("region", {}).get("startLine"),
            one["properties"]["root"],
        )
        for one in run["results"]
    ]
    assert places == [("training.plain", 20, 1), ("training.gradients", 20, 1), ("training.plain", None, 2)]
    assert all(run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"] for one in run["results"])
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 3)
    told = [one["message"]["text"].partition(":")[0] for one in invocation["toolExecutionNotifications"]]
    assert told == ["error", "1 laws were not reached"]
    holds = sessions.ledger([Verdict("norms.sum", sessions.MINE, "holds", 12)])
    assert written(holds)["runs"][0]["invocations"][0]["executionSuccessful"]
    assert written(holds)["runs"][0]["results"] == []


def test_annotations_are_at_the_users_line_and_one_a_root() -> None:
    lines = github.lines(sessions.mixed())
    heads = [line.partition("::the run")[0].partition("::Traceback")[0] for line in lines]
    assert heads == [
        "::error title=fsdpcheck%3A train.py%3AMyAdapter breaks training.plain,file=train.py,line=20",
        "::error title=fsdpcheck%3A train.py%3AMyAdapter breaks training.plain,file=train.py",
        "::error title=fsdpcheck%3A error%3A state.saved on train.py%3AMyAdapter,file=train.py",
        "::error title=fsdpcheck::1 checks were not reached",
    ]
    assert "%0Aalso broken: training.gradients%0Afsdpcheck replay 'v2:" in lines[0]


def test_a_hostile_adapter_writes_no_command_of_its_own() -> None:
    lines = github.lines(sessions.hostile())
    assert len(lines) == 3
    for line in lines:
        assert re.match(r"::error title=[^,:\n\r]*(,file=[^,:\n\r]*)?::[^\n\r]*$", line), line
    whole = github.command("error", "100%\r\n::set-output::", "a,b:c", places.Place("d,e:f", 3))
    assert whole == "::error title=a%2Cb%3Ac,file=d%2Ce%3Af,line=3::100%25%0D%0A::set-output::"


def test_markdown_says_the_verdict_then_the_findings_then_the_chapters() -> None:
    text = markdown.text(sessions.mixed())
    order = [
        "## fsdpcheck: 2 defects found; the harness itself went wrong",
        "### 1. `train.py:MyAdapter` breaks `training.plain`",
        "### 2. ",
        "| chapter |",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    for line in (
        "- **at**: train.py:20",
        "- **also breaks**: training.gradients",
        "| training | 2 findings | 40 |",
        "| zero | 1 not reached | 0 |",
        "- train.py:MyAdapter: not accepted, so in no case: adam, tied",
    ):
        assert line in text.splitlines()


def test_a_hostile_adapter_writes_no_markup_into_markdown() -> None:
    """Outside of fences nothing of it is a tag, a link, or the end of a fold; inside, no line ends the fence."""
    outside, fence = [], ""
    for line in markdown.text(sessions.hostile()).splitlines():
        mark = re.match(r"^(`{3,})", line)
        if fence:
            fence = "" if line == fence else fence
        elif mark is not None:
            fence = mark[1]
        else:
            outside.append(re.sub(r"(`+) .*? \1|`[^`]*`", "", line))
    assert fence == ""
    tags = re.findall(r"(?<!\\)<\w[^>]*>", "\n".join(outside))
    assert set(tags) <= {"<details>", "<summary>"}
    assert "\x1b" not in "".join(outside)


@each("made", EVERY)
def test_no_form_of_a_session_depends_on_the_machine(
    made: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = [form(made()) for form in (junit.text, sarif.document, markdown.text, github.lines)]
    monkeypatch.chdir(tmp_path)
    assert [form(made()) for form in (junit.text, sarif.document, markdown.text, github.lines)] == told


@pytest.mark.parametrize(
    ("lines", "place", "adapter", "found"),
    [
        ("/home/me/project/a b.py:20, 22 in f: x = {1:2}", "/x.py:1", "train.py:A", "a b.py:20"),
        ("/home/me/project/a.py:12-14 in f", "", "train.py:A", "a.py:12"),
        ("4 functions of /home/me/project/a.py", "/home/me/project/b.py:3", "train.py:A", "b.py:3"),
        ("", "/elsewhere/c.py:9", "train.py:A", "/elsewhere/c.py:9"),
        ("", "", "sub/train.py:A", "sub/train.py"),
        ("", "", "package.mod:A", "src/package/mod.py"),
        ("", "", "fully_shard", "None"),
        ("", "", "unknown.mod:A", "None"),
    ],
)
def test_a_finding_is_at_the_first_line_that_is_known(lines: str, place: str, adapter: str, found: str) -> None:
    ledger = sessions.mixed()
    ledger.sources = {"key": {"files": {"/home/me/project/src/package/mod.py": "abc"}}}
    finding = dataclasses.replace(sessions.finding(adapter=adapter), lines=lines, place=place)
    assert str(places.of_finding(finding, ledger)) == found
    if not found.startswith(("/", "None")):
        assert str(places.of_finding(finding, ledger, "/home/me")) == f"project/{found}"
