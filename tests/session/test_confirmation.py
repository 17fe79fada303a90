"""What a session says of findings that were run again: on which ranks, and what differed there; one kind is enough."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._common import metal
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.report import finding as report
from fsdpcheck.session import confirmation
from fsdpcheck.session.confirmation import Confirmed, Confirming
from fsdpcheck.session.plan import Plan
from tests.common import sessions

CASE = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(3))
FOUND: Finding = replace(sessions.finding(), case=json.loads(CASE.to_json()), kind="value", got="2")
LAW = cast(Any, None)


def confirming(confirm: bool = True) -> Confirming:
    return Confirming(ExitStack(), Plan(("ddp",), confirm=confirm))


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Verdict]:
    """By kind of ranks, what the law comes to there; no kind but these can be had."""
    there: dict[str, Verdict] = {}
    monkeypatch.setattr(metal.Metal, "lacks", lambda self, ranks=1: "")
    monkeypatch.setattr(confirmation, "opened", lambda stack, kind, budget: kind)
    monkeypatch.setattr(
        confirmation, "Run", lambda engine, adapter, installs: SimpleNamespace(engine=engine, asked=None)
    )
    monkeypatch.setattr(confirmation, "check_case", lambda law, run, case, diagnose: there[run.engine])
    return there


def broken(got: str = "2") -> Verdict:
    return Verdict("norms.sum", "ddp", "finding", finding=replace(FOUND, got=got))


HOLDS = Verdict("norms.sum", "ddp", "holds")


def test_every_kind_of_real_ranks_that_breaks_the_law_is_named(verdicts: dict[str, Verdict]) -> None:
    verdicts |= {"processes": broken(), "nccl": broken()}
    told = confirming()(LAW, FOUND)
    assert (told["confirmed"], told["confirmed_on"], told["note"]) == (
        "yes",
        ("gloo x3", "nccl x3"),
        FOUND.note,
    )


def test_one_kind_is_enough_and_what_another_says_is_told(verdicts: dict[str, Verdict]) -> None:
    verdicts |= {"processes": broken("3"), "nccl": HOLDS}
    told = confirming()(LAW, replace(FOUND, note=""))
    assert (told["confirmed"], told["confirmed_on"]) == ("yes", ("gloo x3",))
    assert told["note"].startswith("the law breaks on gloo too, with other numbers: got 3; on nccl: holds")


def test_a_law_that_holds_on_all_real_ranks_is_not_confirmed(verdicts: dict[str, Verdict]) -> None:
    verdicts |= {"processes": HOLDS, "nccl": HOLDS}
    told = confirming()(LAW, FOUND)
    assert (told["confirmed"], told["confirmed_on"]) == ("no", ())


@pytest.mark.parametrize(("kind", "on"), [("nccl", "nccl x3"), ("torchrun", "gloo x3"), ("processes", "gloo x3")])
def test_what_was_found_on_real_ranks_is_confirmed_there(kind: str, on: str) -> None:
    told = confirming()(LAW, replace(FOUND, engine=kind))
    assert (told["confirmed"], told["confirmed_on"]) == ("yes", (on,))


def test_nothing_is_run_again_where_nobody_wants_it() -> None:
    told = confirming(confirm=False)(LAW, replace(FOUND, note=""))
    assert told == {"token": FOUND.token, "confirmed": "not tried", "confirmed_on": (), "note": "--no-confirm"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Confirmed("yes", on=("gloo x3", "nccl x3")), "gloo x3, nccl x3"),
        (Confirmed("no", "on gloo: holds"), "none (on gloo: holds)"),
        (Confirmed("not tried", "--no-confirm"), "not tried (--no-confirm)"),
    ],
    ids=["yes", "no", "not tried"],
)
def test_a_report_names_the_ranks_or_says_that_there_are_none(said: Confirmed, words: str) -> None:
    assert report.confirmed(replace(FOUND, confirmed=said.confirmed, confirmed_on=said.on, note=said.note)) == words
