"""run --resume: what an interrupted or killed session found out is taken over, and nothing of another session is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck import cli, supervise
from fsdpcheck.errors import UsageError
from fsdpcheck.ledger import Ledger
from fsdpcheck.plan import Plan
from fsdpcheck.report import document
from fsdpcheck.report.earlier import Earlier, earlier
from fsdpcheck.verdict import Verdict

TOY = f"{Path(__file__).parent / 'toys' / 'laws.py'}:adapter"
PLAN = Plan((TOY,), ("toy.completes", "toy.small", "toy.secret", "toy.broken"), world_sizes=(1,), confirm=False)
HELD = Verdict("a.held", "x", "holds", cases=3)
BROKEN = Verdict("b.broken", "x", "error", reason="a bug", exit_code=3)
SHORT = Verdict("c.short", "x", "holds", cases=1, reason="the budget ran out")
OTHERS = Plan(("x",), ("*",))
VERSIONS = {"python": "3", "torch": "2"}


def _told(file: Path, *verdicts: Verdict, plan: Plan = OTHERS) -> document.Journal:
    """A session that has told ``verdicts`` and was killed."""
    journal = document.Journal(file, plan)
    names = [verdict.law for verdict in verdicts]
    journal.note(
        {"event": "plan", "laws": names, "guarantees": {}, "versions": VERSIONS, "installs": [], "unaccepted": {}}
    )
    for verdict in verdicts:
        journal.note({"event": "verdict", **verdict.to_data()})
    journal.leave()
    return journal


def _run(plan: Plan, known: Earlier | None = None) -> tuple[Ledger, list[str]]:
    begun = []

    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "law":
            begun.append(event["law"])

    return supervise.supervise(plan, listen, 1, known), begun


def test_a_session_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    whole, begun = _run(PLAN)
    assert begun == list(PLAN.laws)
    kept = {pair: verdict for pair, verdict in whole.verdicts.items() if pair[0] in ("toy.small", "toy.secret")}
    file.write_text(json.dumps(document.document(replace(whole, verdicts=kept, interrupted=True))))
    again, begun = _run(PLAN, earlier(file, PLAN))
    assert begun == ["toy.completes", "toy.broken"]
    assert list(again.verdicts) == list(whole.verdicts)
    assert again.verdicts["toy.small", TOY] == whole.verdicts["toy.small", TOY]
    assert (again.exit_code, again.interrupted) == (whole.exit_code, False)


def test_only_what_stands_is_taken_over(tmp_path: Path) -> None:
    _told(tmp_path / "out.json", HELD, BROKEN, SHORT)
    assert earlier(tmp_path / "out.json", OTHERS).verdicts == (HELD,)


def test_a_killed_sessions_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    _told(file, HELD, replace(HELD, law="d.cut"))
    path = document.journal_of(file)
    path.write_text(path.read_text()[:-20])
    assert earlier(file, OTHERS).verdicts == (HELD,)
    journal = document.Journal(file, OTHERS, goes_on=True)
    journal.note({"event": "verdict", **replace(HELD, law="e.next").to_data()})
    journal.leave()
    assert [verdict.law for verdict in earlier(file, OTHERS).verdicts] == ["a.held", "e.next"]


def test_a_document_counts_beside_the_journal_of_who_went_on_and_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    ledger = Ledger(OTHERS, versions=VERSIONS, verdicts={("a.held", "x"): HELD})
    _told(file, HELD).close(ledger)
    _told(file, replace(HELD, law="e.next"))
    assert [verdict.law for verdict in earlier(file, OTHERS).verdicts] == ["a.held", "e.next"]


def test_without_a_file_all_is_to_be_done(tmp_path: Path) -> None:
    assert earlier(tmp_path / "out.json", OTHERS).verdicts == ()


@pytest.mark.parametrize(
    ("change", "plan", "said"),
    [
        (lambda text: text, replace(OTHERS, seed=7), "another plan: its seed: 0, asked: 7; next: leave --resume out"),
        (lambda text: text.replace('"fsdpcheck": "', '"fsdpcheck": "9.'), OTHERS, "is of fsdpcheck 9."),
        (lambda text: "no session", OTHERS, "cannot be read as a session"),
    ],
)
def test_another_session_is_refused(tmp_path: Path, change: Any, plan: Plan, said: str) -> None:
    file = tmp_path / "out.json"
    _told(file, HELD)
    path = document.journal_of(file)
    path.write_text(change(path.read_text()))
    with pytest.raises(UsageError, match=said):
        earlier(file, plan)


def test_verdicts_of_another_torch_are_refused_and_stay_in_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    arguments = ["run", "--adapter", TOY, "--law", "toy.completes", "--world-size", "1", "--json", str(file)]
    assert cli.main(arguments) == 0
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "versions": {**data["versions"], "torch": "1.0"}}))
    then = file.read_text()
    assert cli.main([*arguments, "--resume"]) == 2
    assert f"the verdicts in {file} are of torch 1.0, now {data['versions']['torch']}" in capsys.readouterr().err
    assert file.read_text() == then
