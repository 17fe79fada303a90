"""A judge that is asked law by law, in a process of its own: what it says is what a session says, whoever dies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fsdpcheck.errors import NO_PROGRESS, UsageError
from fsdpcheck.findings.verdict import NOT_CHECKED, Verdict
from fsdpcheck.session.judge import Judge
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.supervisor import supervise
from tests.common.commands import LAWS, TOY, TOYS

PLAN = Plan((TOY,), ("toy.completes", "toy.small", "toy.crashes", "toy.secret"), world_sizes=(1,), laws_from=(LAWS,))


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    found = Judge(replace(PLAN, confirm=False))
    found.begin()
    yield found
    found.rest()


def test_it_says_what_a_session_says_in_whatever_order_it_is_asked(judge: Judge) -> None:
    """Also behind a law that ends its process, which is a finding: the next question starts another."""
    asked = ("toy.crashes", "toy.small", "toy.completes", "toy.secret")
    told = {law: replace(judge.ask(law, TOY), seconds=0.0) for law in asked}
    judge.rest()
    ledger = supervise(judge.ledger.plan, lambda ledger, event: None)
    assert told == {law: replace(verdict, seconds=0.0) for (law, _), verdict in ledger.verdicts.items()}
    finding = told["toy.crashes"].finding
    assert finding is not None
    assert finding.kind == "lost"


def test_it_knows_what_is_promised_before_it_is_asked(judge: Judge) -> None:
    assert judge.unpromised == {TOY: {"toy.secret": "no promise 'private': a toy has no secrets"}}
    assert {*judge.spaces} == {"toy.completes", "toy.small", "toy.crashes", "toy.secret"}


def test_a_plan_that_cannot_begin_is_the_callers_error() -> None:
    for plan, said in (
        (Plan(("refrence",)), "unknown adapter 'refrence'. Did you mean 'reference'?"),
        (replace(PLAN, laws=("toy.zzz",)), "no law matches 'toy.zzz'"),
    ):
        with pytest.raises(UsageError) as raised:
            Judge(plan).begin()
        assert said in str(raised.value)


def test_an_adapter_whose_ranks_never_came_back_is_asked_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(PLAN)
    never = Verdict("toy.small", TOY, "error", reason="no progress", exit_code=NO_PROGRESS)
    judge._stuck[TOY] = never.law
    verdict = judge.ask("toy.completes", TOY)  # and starts no process
    assert (verdict.status, verdict.exit_code) == ("error", NO_PROGRESS)
    assert verdict.reason == f"{NOT_CHECKED}: its ranks made no progress in toy.small"
    assert judge.ledger.verdicts["toy.completes", TOY] == verdict


def test_findings_are_confirmed_before_they_are_told() -> None:
    judge = Judge(Plan((f"{TOYS / 'unsharded.py'}:Toy",), ("training.plain",), world_sizes=(2,)))
    verdict = judge.ask("training.plain", judge.ledger.plan.adapters[0])
    judge.rest()
    assert verdict.finding is not None
    assert verdict.finding.confirmed == "yes"
