"""What a preflight answers: yes, no with its findings, or why neither."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.judging import registry
from fsdpcheck.report import preflight
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan

HANG, GRADIENTS, CHECKPOINT, MEMORY = range(4)


def plain(text: str, colour: str) -> str:
    return text


def finding(law: str, kind: str, what: str = "wrong") -> Finding:
    texts = dict.fromkeys(("guarantee", "place", "got", "wanted", "where", "cause", "words", "token"), "")
    more: Any = {**texts, "law": law, "kind": kind, "what": what, "adapter": "one", "engine": "torchrun", "case": {}}
    return Finding(**more)


def holds(law: str) -> Verdict:
    return Verdict(law, "one", "holds", 10)


def breaks(law: str, kind: str, what: str = "wrong") -> Verdict:
    return Verdict(law, "one", "finding", 1, finding=finding(law, kind, what), exit_code=1)


def answers(*verdicts: Verdict, laws: tuple[str, ...] = ()) -> list[str]:
    """The answer to each question, without its words."""
    ledger = Ledger(Plan(("one",)), laws or tuple(verdict.law for verdict in verdicts))
    ledger.verdicts = {(verdict.law, verdict.adapter): verdict for verdict in verdicts}
    lines = preflight.answers(ledger, plain).splitlines()[1:]
    assert len(lines) == len(preflight.QUESTIONS)
    for line, one in zip(lines, preflight.QUESTIONS, strict=True):
        assert one.what in line
    return [line.replace(one.what, "_").strip() for line, one in zip(lines, preflight.QUESTIONS, strict=True)]


ALL = tuple(map(holds, preflight.laws(real=False)))


def all_but(*others: Verdict) -> tuple[Verdict, ...]:
    return (*(one for one in ALL if one.law not in {other.law for other in others}), *others)


def test_every_law_of_a_question_is_a_law() -> None:
    known = registry.chapters()
    for real in (False, True):
        assert set(preflight.laws(real)) <= known.keys()


def test_all_that_hold_is_four_times_yes() -> None:
    found = answers(*ALL)
    assert [line.split()[0] for line in found] == ["yes"] * 4
    assert found[HANG] == "yes          _: 20 cases of one"


@pytest.mark.parametrize(
    ("verdicts", "question", "said"),
    [
        (
            all_but(Verdict("state.resharded", "one", "not promised", reason="no promise 'resharded'")), CHECKPOINT,
            "in part      _: 10 cases of one; nothing is said by state.resharded: no promise 'resharded'",
        ),
        ((holds("training.plain"),), GRADIENTS,
         "in part      _: 10 cases of one; nothing was asked by global-norm.returned"),
        (all_but(Verdict("clipping.norms", "one", "not promised")), GRADIENTS, "yes          _: 40 cases of one"),
        ((holds("rounding.gradients"),), GRADIENTS, "yes          _: 10 cases of one"),
    ],
)  # fmt: skip
def test_a_yes_is_no_more_than_what_was_judged(verdicts: tuple[Verdict, ...], question: int, said: str) -> None:
    assert answers(*verdicts)[question] == said


@pytest.mark.parametrize(
    ("law", "kind", "question"),
    [
        ("collectives.plain", "deadlock", HANG),
        ("collectives.private", "mismatch", HANG),
        ("collectives.plain", "lost", HANG),
        ("collectives.plain", "value", GRADIENTS),
        ("training.plain", "unsafe", HANG),
        ("state.resharded", "deadlock", HANG),
        ("training.gradients", "value", GRADIENTS),
        ("global-norm.returned", "raised", GRADIENTS),
        ("rounding.gradients", "value", GRADIENTS),
        ("state.resharded", "value", CHECKPOINT),
        ("lifecycle.memory", "value", MEMORY),
    ],
)
def test_a_finding_is_a_no_to_the_question_that_it_is_about(law: str, kind: str, question: int) -> None:
    found = answers(*all_but(breaks(law, kind)))
    assert [place for place, line in enumerate(found) if line == "NO           _: finding 1"] == [question], found


def test_a_law_that_met_a_hang_leaves_its_own_question_open() -> None:
    found = answers(*all_but(breaks("training.plain", "deadlock")))
    assert found[GRADIENTS] == "not decided  _: training.plain of one met what another question is about"


def test_findings_have_the_numbers_that_they_are_printed_with() -> None:
    broken = breaks("training.plain", "value", "a"), breaks("global-norm.returned", "value", "b")
    assert answers(*all_but(*broken))[GRADIENTS] == "NO           _: findings 1, 2"


def test_what_was_not_judged_to_its_end_is_no_yes() -> None:
    error = Verdict("state.resumed", "one", "error", 3, reason="it raised\nmore", exit_code=3)
    assert answers(*all_but(error))[CHECKPOINT] == "not decided  _: state.resumed of one: it raised"
    vain = [Verdict(law, "one", "not promised", reason="no promise") for law in ("state.resumed", "state.resharded")]
    assert answers(*all_but(*vain))[CHECKPOINT] == "not decided  _: one: no promise"
    left = "nothing is said by state.resumed: no promise"
    assert answers(*all_but(vain[0]))[CHECKPOINT] == f"in part      _: 10 cases of one; {left}"
    few = tuple(verdict for verdict in ALL if verdict.law != "shards.cover")
    assert answers(*few, laws=preflight.laws(real=False))[MEMORY] == "not decided  _: shards.cover of one: not reached"
    assert answers(holds("collectives.plain"))[MEMORY] == "not decided  _: none of its laws was asked"
