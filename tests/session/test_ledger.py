"""The ledger, and what the reports make of it: nothing that was told is lost, nothing is counted as more than it is."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.errors import UsageError
from fsdpcheck.findings import roots
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.verdict import Finding, Verdict, exit_code
from fsdpcheck.report import colour, document, finding, summary, table
from fsdpcheck.report.conditions import CONDITIONS
from fsdpcheck.report.progress import progress
from fsdpcheck.session import journal as journals
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan, parse_world_sizes
from tests.common.tables import each

CASE = TrainingCase(model=ModelSpec(layers=(LayerSpec(width=2),)), layout=BatchLayout(batch_size=2))

FINDING = Finding(
    law="norms.sum",
    guarantee="Norms are norms.",
    adapter="opacus",
    engine="simulated",
    kind="raised",
    place="opacus/x.py:7",
    what="the run did not complete",
    got="ValueError\nin two lines",
    wanted="all ranks finish",
    where="rank 1",
    cause="W times too large",
    case=json.loads(CASE.to_json()),
    words=CASE.describe(),
    token="v1:token",
)


CENSUS = {"W=1": 12, "tier exact": 9, "tier any C": 3}


def plain(text: str, colour: str) -> str:
    return text


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(Plan(adapters=("opacus",)))
    laws = ["a.holds", "norms.sum", "c.reserved", "d.unreached"]
    plan = {"laws": laws, "guarantees": {}, "versions": {"torch": "2"}, "installs": ["x:y"]}
    ledger.take({"event": "plan", **plan, "unaccepted": {"opacus": ["adam", "tied"]}})
    for verdict in (
        Verdict("a.holds", "opacus", "holds", cases=12, rejected=3, seconds=1.5, census=CENSUS),
        Verdict("norms.sum", "opacus", "finding", cases=2, finding=FINDING, exit_code=1),
        Verdict("c.reserved", "opacus", "not promised", reason="no promise 'plain': cannot"),
    ):
        ledger.take({"event": "law", "law": verdict.law, "adapter": verdict.adapter})
        ledger.take({"event": "case", "law": verdict.law, "adapter": verdict.adapter, "case": CASE.to_json()})
        ledger.take(json.loads(json.dumps({"event": "verdict", **verdict.to_data()})))
    return ledger


def test_verdicts_go_through_json_unchanged(ledger: Ledger) -> None:
    assert ledger.verdicts["norms.sum", "opacus"].finding == FINDING
    assert ledger.verdicts["a.holds", "opacus"].census == CENSUS


def test_a_confirmation_reaches_its_finding(ledger: Ledger) -> None:
    told = {
        "event": "confirmation",
        "law": "norms.sum",
        "adapter": "opacus",
        "confirmed": "no",
        "confirmed_on": ["gloo x2"],
        "note": "why",
    }
    ledger.take({**told, "token": FINDING.token})
    found = ledger.findings[0]
    assert (found.confirmed, found.confirmed_on, found.note) == ("no", ("gloo x2",), "why")
    verdict = ledger.verdicts["norms.sum", "opacus"]
    ledger.verdicts["norms.sum", "opacus"] = replace(verdict, behind=(replace(FINDING, token="v1:other"),))
    ledger.take({**told, "token": "v1:other", "note": "of the other"})
    assert [finding.note for finding in ledger.findings] == ["why", "of the other"]


def test_a_lost_process_is_a_finding_of_the_case_that_ran(ledger: Ledger) -> None:
    ledger.take({"event": "law", "law": "d.unreached", "adapter": "opacus"})
    ledger.take({"event": "case", "law": "d.unreached", "adapter": "opacus", "case": CASE.to_json()})
    assert ledger.lose("it was ended by SIGSEGV")
    lost = ledger.findings[-1]
    assert (lost.kind, lost.got, decode(lost.token).case) == ("lost", "it was ended by SIGSEGV", CASE)
    assert decode(lost.token).installs == ("x:y",)


def test_of_several_workers_the_one_that_died_had_the_case() -> None:
    ledger = Ledger(Plan(adapters=("opacus",)))
    for worker, law in enumerate(("a.first", "b.second", "c.third")):
        ledger.take({"event": "law", "law": law, "adapter": "opacus"}, worker)
        ledger.take({"event": "case", "law": law, "adapter": "opacus", "case": CASE.to_json()}, worker)
    lost = ledger.lose("it was ended by SIGSEGV", 1)
    assert lost is not None
    assert (lost.law, lost.cases) == ("b.second", 1)
    assert [at.law for at in ledger.running.values()] == ["a.first", "c.third"]


def test_verdicts_end_in_the_order_of_the_plan() -> None:
    ledger = Ledger(Plan(adapters=("x", "y")))
    ledger.take(
        {"event": "plan", "laws": ["a", "b"], "guarantees": {}, "versions": {}, "installs": [], "unaccepted": {}}
    )
    for law, adapter in (("b", "y"), ("b", "x"), ("a", "x")):
        ledger.take({"event": "verdict", **Verdict(law, adapter, "holds").to_data()})
    ledger.take({"event": "end", "interrupted": True})
    assert list(ledger.verdicts) == [("a", "x"), ("b", "x"), ("b", "y")]


def test_a_process_lost_outside_any_case_is_no_finding(ledger: Ledger) -> None:
    assert ledger.lose("it exited with code 1") is None
    ledger.take({"event": "law", "law": "d.unreached", "adapter": "opacus"})
    assert ledger.lose("it exited with code 1") is None


def test_a_complete_session_that_left_something_out_is_an_error(ledger: Ledger) -> None:
    assert ledger.exit_code == 1
    ledger.take({"event": "end", "interrupted": False})
    assert ledger.exit_code == 3


def test_an_interrupted_session_has_its_own_code(ledger: Ledger) -> None:
    ledger.take({"event": "end", "interrupted": True})
    assert ledger.exit_code == 130


@pytest.mark.parametrize(
    ("codes", "code"), [([], 0), ([0, 0], 0), ([0, 4], 4), ([4, 1], 1), ([1, 2, 4], 2), ([2, 3, 1], 3)]
)
def test_the_worst_code_counts(codes: list[int], code: int) -> None:
    assert exit_code(codes) == code


def test_the_table_shows_every_law_and_never_a_pass_that_was_none(ledger: Ledger) -> None:
    lines = table.table(ledger, plain).splitlines()
    shown = [law for law in ledger.laws if law != "c.reserved"]
    assert [line.split()[:2] for line in lines[1:4]] == [["opacus", law] for law in shown]
    assert lines[1].split()[2:] == ["holds", "12", "3", "1.5", "s", "exact", "9,", "any", "C", "3"]
    assert "not reached" in lines[3]
    assert lines[4:] == ["opacus: not promised: c.reserved (no promise 'plain': cannot)"]


def test_the_summary_counts_each_kind(ledger: Ledger) -> None:
    """What is rejected need not be inexact: of some cases a law says nothing on what the adapter shows."""
    wanted = "1 checks hold, 1 finding of 1 root, 1 not promised, 1 not reached; 14 distinct cases judged, 3 rejected, "
    assert table.summary(ledger).startswith(wanted)


def test_what_an_adapter_does_not_accept_is_named_where_something_holds(ledger: Ledger) -> None:
    line = "opacus: not accepted, so in no case: adam, tied\n"
    assert line in summary.ending(ledger, plain)
    del ledger.verdicts["a.holds", "opacus"]
    assert line not in summary.ending(ledger, plain)


def test_findings_of_one_root_are_told_once() -> None:
    again = replace(FINDING, law="norms.other", got="another text", token="v1:other")
    elsewhere = replace(FINDING, law="norms.third", place="opacus/y.py:1")
    groups = roots.grouped([FINDING, again, elsewhere])
    assert groups == [[FINDING, again], [elsewhere]]
    text = finding.render(groups[0], 1, plain)
    assert "the same root breaks norms.other: fsdpcheck replay 'v1:other'" in text
    assert text.count("guarantee") == 1


def test_a_wrong_value_is_no_one_elses_root() -> None:
    value = replace(FINDING, kind="value", place="")
    assert roots.same(value, replace(value, law="other", got="7"))
    assert not roots.same(value, replace(value, cause=""))
    assert not roots.same(value, replace(value, adapter="mine"))


def test_a_finding_of_one_trait_says_how_to_leave_it_out() -> None:
    for kind, said in (("bias", "  avoid     --avoid bias leaves such cases out\n"), ("several ranks", "")):
        when = f"holds with one change: no bias\nonly cases with {kind} fail: 9 of them; none of 21 others does"
        text = finding.render([replace(FINDING, when=when)], 1, plain)
        assert said in text
        assert ("--avoid" in text) == bool(said)


def test_where_no_cause_is_looked_for_it_says_where_one_is() -> None:
    for engine in ("processes", "torchrun", "nccl"):
        text = finding.render([replace(FINDING, engine=engine, cause="")], 1, plain)
        assert "  cause     looked for on simulated ranks alone: replay it with --engine simulated\n" in text
    assert "  cause  " not in finding.render([replace(FINDING, cause="")], 1, plain)
    assert "probably: W times too large" in finding.render([replace(FINDING, engine="processes")], 1, plain)


def test_a_finding_is_told_in_full() -> None:
    text = finding.render([FINDING], 3, plain)
    for line in (
        "FINDING 3: opacus breaks norms.sum",
        "  guarantee Norms are norms.",
        "  got       ValueError",
        "            in two lines",
        "  cause     probably: W times too large",
        "  replay with: fsdpcheck replay 'v1:token'",
    ):
        assert line in text.splitlines()


def test_the_replay_line_repeats_what_a_token_alone_may_not_import() -> None:
    foreign = replace(FINDING, adapter="my file.py:x")
    command = finding.replay_command(foreign, ["fsdpcheck.impl.faults:f", "mine:y"])
    file = Path("my file.py").resolve()
    assert command == f"fsdpcheck replay 'v1:token' --adapter '{file}:x' --install mine:y"


def test_the_ending_says_what_was_interrupted(ledger: Ledger) -> None:
    ledger.take({"event": "error", "text": "the moon is full", "exit_code": 3})
    ledger.take({"event": "end", "interrupted": True})
    text = summary.ending(ledger, plain)
    assert "ERROR: the moon is full" in text
    assert text.splitlines()[-1].startswith("interrupted: 1 checks hold")


def test_the_ending_says_that_privacy_is_judged_for_given_lists(ledger: Ledger) -> None:
    said = f"privacy.* is {CONDITIONS['privacy.*']}"
    for cases in (0, 3):
        ledger.verdicts["privacy.sensitivity", "mine"] = Verdict("privacy.sensitivity", "mine", "holds", cases)
        assert (said in summary.ending(ledger, plain)) == bool(cases)
        assert document.document(ledger)["conditions"] == (CONDITIONS if cases else {})
    assert "conditional on the lists they drew" in said


def test_laws_that_are_not_promised_for_one_reason_are_one_line() -> None:
    """Of a few the names, of many how many there are and of which chapters: an adapter leaves out a hundred."""
    few = {f"noise.{n}": f"no promise 'noise': adds none{'' if n else ' at all'}" for n in range(3)}
    many = {f"features.{n}": f"no promise 'features.{n}': those of FSDP2" for n in range(5)}
    other = {"norms.shown": "the adapter does not show norms"}
    reasons = {**few, **many, **other}
    ledger = Ledger(Plan(("ddp",)), tuple(reasons))
    ledger.verdicts = {(law, "ddp"): Verdict(law, "ddp", "not promised", reason=why) for law, why in reasons.items()}
    assert table.table(ledger, lambda text, _: text).splitlines() == [
        "ddp: not promised: noise.0 (no promise 'noise': adds none at all)",
        "ddp: not promised: noise.1, noise.2 (no promise 'noise': adds none)",
        "ddp: not promised: 5 laws of features (no promise 'features.0', 'features.1', 'features.2' and 2 more:"
        " those of FSDP2)",
        "ddp: not promised: norms.shown (the adapter does not show norms)",
    ]


def test_laws_that_are_not_promised_are_no_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    shown, ledger = progress(verbose=True), Ledger(Plan(("ddp",)), ("a.law", "b.law"))
    for law, status in (("a.law", "not promised"), ("b.law", "holds")):
        event = {"event": "verdict", **Verdict(law, "ddp", status).to_data()}  # type: ignore[arg-type]
        ledger.take(event)
        shown(ledger, event)
    assert capsys.readouterr().err == "[2/2] ddp: b.law: holds (0 cases, 0.0 s)\n"


def test_the_journal_holds_every_verdict_until_the_document_does(ledger: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    journal = journals.Journal(file, Plan(("reference",)))
    journal.note({"event": "case", "case": "left out"})
    journal.note({"event": "verdict", **ledger.verdicts["norms.sum", "opacus"].to_data()})
    began, verdict = map(json.loads, (tmp_path / "out.json.journal").read_text().splitlines())
    assert began["plan"]["adapters"] == ["reference"]
    assert verdict["finding"]["token"] == "v1:token"
    journal.close(document.document(ledger))
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    data = json.loads(file.read_text())
    assert (data["schema"], data["exit_code"], len(data["verdicts"])) == (8, 1, 3)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "stream", "coloured"),
    [
        ({}, Terminal(), True),
        ({"NO_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
        ({}, io.StringIO(), False),
    ],
)
def test_colours_only_on_a_terminal_that_wants_them(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], stream: Any, coloured: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b" in colour.painter(stream)("text", "red")) is coloured


def test_a_plan_goes_through_json_unchanged() -> None:
    plan = Plan(adapters=("a", "b"), laws=("x.*",), world_sizes=(2, 4), installs=("m:n",), seed=3, budget=1.5)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("text", "sizes"), [("3", (3,)), ("1-3", (1, 2, 3)), ("4,2", (2, 4)), ("1-2, 2-3", (1, 2, 3))])
def test_world_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_world_sizes(text) == sizes


@each("text", ["", "0", "2-1", "65", "1-", "-1", "a", "1;2", "9" * 9])
def test_bad_world_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="world size"):
        parse_world_sizes(text)


def test_many_traits_that_are_not_accepted_are_counted_in_a_short_report() -> None:
    ledger = Ledger(Plan(("opacus",)))
    names = [f"trait{number}" for number in range(9)]
    plan = {"laws": ["a"], "guarantees": {}, "versions": {}, "installs": [], "unaccepted": {"opacus": names}}
    ledger.take({"event": "plan", **plan})
    ledger.take({"event": "verdict", **Verdict("a", "opacus", "holds", 3).to_data()})
    short, whole = table.unaccepted(ledger, verbose=False), table.unaccepted(ledger)
    assert short.startswith("opacus: 9 traits are not accepted, so in no case\n(-v names them")
    assert ", ".join(names) in whole
    assert "trait3" not in short
