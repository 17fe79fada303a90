"""Kept sessions: a document is valid by its schema, and is read back as the session that it tells of, or refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from fsdpcheck.case import Trait
from fsdpcheck.errors import UsageError, reading
from fsdpcheck.findings.ranks import CALLS, LONGEST, RankStood
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.report import document, document_reader
from fsdpcheck.report.chapters import headline
from fsdpcheck.report.forms import markdown
from fsdpcheck.report.page import page
from fsdpcheck.session.ledger import Ledger, Origin
from fsdpcheck.session.plan import Plan
from tests.common import sessions
from tests.common.tables import each

SCHEMA = json.loads(resources.files("fsdpcheck.report").joinpath("schema.json").read_text(encoding="utf-8"))
VALID = jsonschema.Draft202012Validator(SCHEMA)


def written(ledger: Ledger) -> Any:
    """The document as another process reads it."""
    return json.loads(json.dumps(document.document(ledger)))


@pytest.fixture
def ledger() -> Ledger:
    found = sessions.mixed()
    found.sources = {"key": {"own": "abc", "files": {"/home/me/project/train.py": "abc"}, "packages": {}}}
    found.origins = {pair: Origin(found.began, "key") for pair in found.verdicts}
    return found


@each("made", [sessions.mixed, sessions.large, sessions.hostile, lambda: Ledger(Plan(("x",)))])
def test_a_document_is_valid_and_is_read_back_unchanged(made: Callable[[], Ledger]) -> None:
    data = written(made())
    assert [error.message for error in VALID.iter_errors(data)] == []
    assert written(document_reader.ledger(data)) == data


def test_the_schema_is_a_schema_of_this_version_and_names_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema"] == {**SCHEMA["properties"]["schema"], "const": document.SCHEMA}
    assert list(SCHEMA["properties"]) == list(written(sessions.mixed()))
    for kind in (Verdict, Finding, Plan, RankStood):
        known = SCHEMA["$defs"][kind.__name__]
        names = [field.name for field in dataclasses.fields(kind)]
        assert list(known["properties"]) == names == known["required"], "next: write the new field into schema.json"
    assert SCHEMA["$defs"]["Plan"]["properties"]["avoid"]["items"]["enum"] == list(get_args(Trait))


def test_a_part_of_a_session_is_refused_and_says_how_to_merge() -> None:
    found = sessions.mixed()
    found.plan = replace(found.plan, shard=(2, 3))
    with pytest.raises(reading.Unreadable, match=r"part 2 of 3 of a session.*fsdpcheck merge"):
        document_reader.ledger(written(found))


def _without(name: str) -> Callable[[Any], None]:
    return lambda data: data.pop(name)


def _of_verdict(**changed: Any) -> Callable[[Any], None]:
    return lambda data: data["verdicts"][0].update(changed)


BROKEN = {
    "no laws": (_without("laws"), "has no 'laws'"),
    "another schema": (lambda data: data.update(schema=5), "it is of schema 5, this release reads 8"),
    "a strange key": (lambda data: data.update(strange=1), "unknown key 'strange'"),
    "a strange status": (_of_verdict(status="fine"), "a word that it may be"),
    "cases in words": (_of_verdict(cases="many"), "a whole number"),
    "a strange time": (lambda data: data.update(began="yesterday"), "began is 'yesterday'"),
    "a strange trait": (lambda data: data["plan"].update(avoid=["frosen"]), "a word that it may be"),
}


@each("name", list(BROKEN))
def test_what_is_no_document_is_refused_by_the_reader_and_by_the_schema(name: str, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    data = written(sessions.mixed())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="is no report of a session") as refused:
        document_reader.read(tmp_path / "report.json")
    assert said in str(refused.value)
    assert (name == "a strange time") == VALID.is_valid(data), "which the schema says in words alone"


EDITED = {
    "a verdict": (_of_verdict(cases=99), "the verdict of norms.sum on train.py:MyAdapter was edited"),
    "a finding taken away": (
        lambda data: data["verdicts"].pop(4),
        "the verdict of training.plain on train.py:MyAdapter was edited",
    ),
    "the plan": (
        lambda data: data["plan"].update(seed=7),
        "its plan, versions, sources, errors or waivers were edited",
    ),
    "the errors": (lambda data: data["errors"].append({"text": "x", "exit_code": 2}), "errors or waivers were edited"),
    "the waivers": (lambda data: data["waived"].update({"v2:x": "me"}), "errors or waivers were edited"),
    "the exit code": (lambda data: data.update(exit_code=0), "its exit code is 0, its verdicts ask for 3"),
}


@each("name", list(EDITED))
def test_what_was_edited_is_refused(name: str, ledger: Ledger, tmp_path: Path) -> None:
    change, said = EDITED[name]
    data = written(ledger)
    assert written(document_reader.ledger(data)) == data
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError) as refused:
        document_reader.read(tmp_path / "report.json")
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"', '{"schema": NaN}', "[" * 100_000])
def test_what_is_no_json_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UsageError, match="is no report of a session"):
        document_reader.read(tmp_path / "report.json")
    with pytest.raises(UsageError, match="is no measurement of power"):
        document_reader.power(tmp_path / "report.json")


def test_what_a_finding_keeps_of_ranks_is_bounded() -> None:
    first = sessions.RANKS[0]
    long = dataclasses.replace(first.calls[0], what="x" * 10_000, where="y" * 10_000)
    many = dataclasses.replace(first, state="z" * 10_000, calls=(*([long] * 100), first.calls[0]))
    bounded = sessions.finding(ranks=(many,)).bounded().ranks[0]
    assert (len(bounded.calls), bounded.earlier, bounded.calls[-1]) == (CALLS, 101 - CALLS, first.calls[0])
    assert max(map(len, (bounded.state, bounded.calls[0].what, bounded.calls[0].where))) == LONGEST


def test_that_all_holds_is_said_only_of_a_session_that_ended_and_judged_something() -> None:
    holds = Verdict("norms.sum", sessions.MINE, "holds", 12)
    skipped = Verdict("norms.sum", sessions.MINE, "not promised")
    broken = {pair: verdict for pair, verdict in sessions.mixed().verdicts.items() if verdict.findings}
    laws = tuple(law for law, _ in broken)
    told = {
        "Every promised law holds": sessions.ledger([holds]),
        "Nothing was judged": sessions.ledger([skipped]),
        "The session did not come to its end": sessions.ledger([holds], ended=False),
        "The session was interrupted": sessions.ledger([holds], interrupted=True),
        "2 defects found": dataclasses.replace(sessions.mixed(), laws=laws, verdicts=broken),
        "2 defects found; the session did not come to its end": dataclasses.replace(
            sessions.mixed(), ended=False, verdicts=broken
        ),
        "2 defects found; the harness itself went wrong": sessions.mixed(),
    }
    for said, ledger in told.items():
        assert headline(ledger) == said
        assert said in markdown.text(ledger)
        assert f"<h1>{said}</h1>" in page.text([ledger])
        look = "bad" if "defect" in said else "good" if said == "Every promised law holds" else "odd"
        assert f'<header class="top {look}">' in page.text([ledger])
