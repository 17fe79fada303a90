"""Agenda: who is asked what first, and what an error of one law leaves out; and that one error is told once."""

from __future__ import annotations

from fsdpcheck.errors import INTERNAL, NO_PROGRESS, USAGE
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report import summary
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.work_queue import Agenda, Pair

LAWS = ("clipping.norms", "collectives.plain", "samplers.shares", "training.plain", "zero.last")
NEEDING = {"a": LAWS[:2] + LAWS[3:], "b": LAWS}
STEP = "the trainer lacks a method\n  got     T without step\n  wanted  step, {law}\nin case {law}"


def _agenda() -> Agenda:
    return Agenda([(law, adapter) for adapter in "ab" for law in LAWS], NEEDING)


def _error(pair: Pair, reason: str = STEP, cases: int = 0, code: int = USAGE) -> Verdict:
    return Verdict(*pair, "error", cases, reason=reason.format(law=pair[0]), exit_code=code)


def _led(agenda: Agenda, *verdicts: Verdict) -> list[str]:
    while agenda.take() is not None:
        pass
    return [vain.law for verdict in verdicts for vain in agenda.hear(verdict)]


def test_each_adapter_is_first_asked_whether_it_trains() -> None:
    agenda, asked = _agenda(), []
    while (pair := agenda.take()) is not None:
        asked.append(pair)
        assert agenda.hear(Verdict(*pair, "holds", 15)) == []
    order = ["training.plain", "collectives.plain", "clipping.norms", "samplers.shares", "zero.last"]
    assert asked == [(law, adapter) for adapter in "ab" for law in order]


def test_others_wait_for_these_verdicts_and_not_for_those_of_other_adapters() -> None:
    agenda = _agenda()
    first = [agenda.take() for _ in range(4)]
    assert first == [(law, adapter) for adapter in "ab" for law in ("training.plain", "collectives.plain")]
    assert (agenda.take(), len(agenda)) == (None, 6)
    agenda.hear(Verdict("training.plain", "b", "holds"))
    assert agenda.take() is None
    agenda.hear(Verdict("collectives.plain", "b", "finding"))
    assert agenda.take() == ("clipping.norms", "b")
    agenda.give_up()
    assert (agenda.take(), len(agenda)) == (None, 0)


def test_one_process_judges_the_laws_of_a_space_one_after_another() -> None:
    """And another begins with another space, while there is one."""
    laws = {"a.one": "x", "b.one": "y", "a.two": "x", "b.two": "y", "a.three": "x"}
    agenda = Agenda([(law, adapter) for adapter in "pq" for law in laws], {}, laws)
    first, second = agenda.take(), agenda.take()
    assert (first, second) == (("a.one", "p"), ("b.one", "p"))
    assert agenda.take(second) == ("b.two", "p")
    assert agenda.take(("b.two", "p")) == ("a.one", "q")
    assert agenda.take(first) == ("a.two", "p")
    assert agenda.take(("a.one", "q")) == ("a.two", "q")
    left = [agenda.take(first) for _ in range(4)]
    assert left == [("a.three", "p"), ("b.one", "q"), ("b.two", "q"), ("a.three", "q")]


def test_one_error_in_the_first_case_of_both_leaves_out_what_would_meet_it_again() -> None:
    agenda = _agenda()
    one, two = ("training.plain", "a"), ("collectives.plain", "a")
    assert _led(agenda, _error(two), _error(one)) == ["clipping.norms", "zero.last"]
    assert {pair[0] for pair in iter(agenda.take, None) if pair and pair[1] == "a"} >= {"samplers.shares"}


def test_a_users_model_of_which_no_case_is_exact_is_asked_no_law_that_trains_it() -> None:
    why = "promised, but no case could be judged: 40 drawn and rejected as not exact"
    vain = [
        Verdict(law, "a", "no case", reason=why, exit_code=USAGE) for law in ("training.plain", "collectives.plain")
    ]
    assert _led(_agenda(), *vain) == ["clipping.norms", "zero.last"]
    other = Verdict("collectives.plain", "a", "no case", reason="on 5 ranks alone", exit_code=USAGE)
    assert _led(_agenda(), vain[0], other) == _led(_agenda(), vain[0], _error(("collectives.plain", "a"))) == []


def test_ranks_that_never_come_back_are_asked_nothing_more() -> None:
    agenda = _agenda()
    left = {vain.law for vain in agenda.hear(_error(("training.plain", "a"), code=NO_PROGRESS)) if vain.exit_code == 4}
    assert left == set(LAWS)
    assert agenda.take() == ("training.plain", "b")


def test_any_other_error_leaves_nothing_out() -> None:
    one, two = ("training.plain", "a"), ("collectives.plain", "a")
    others = (
        _error(two, "another thing is missing"),
        _error(two, cases=3),
        _error(two, code=INTERNAL),
        Verdict(*two, "finding", 1, exit_code=1),
        Verdict(*two, "holds", 15),
    )
    for other in others:
        assert _led(_agenda(), _error(one), other) == [], other
    assert _led(_agenda(), _error(("clipping.norms", "a"))) == []
    assert _led(_agenda(), Verdict(*one, "not promised"), Verdict(*two, "not promised")) == []


def test_an_error_is_told_once_with_all_laws_that_met_it() -> None:
    ledger = Ledger(Plan(("a",), ("*",)), LAWS)
    pairs = [(law, "a") for law in LAWS]
    ledger.verdicts = {pair: _error(pair) for pair in pairs[:3]}
    ledger.verdicts |= {pairs[3]: _error(pairs[3], "another"), pairs[4]: _error(pairs[4], "not checked: for a reason")}
    said = summary.ending(ledger, lambda text, colour: text)
    assert (said.count("ERROR: "), said.count("lacks a method")) == (2, 1)
    assert "the same of 2 other laws: collectives.plain, samplers.shares" in said
    assert "a: the error of clipping.norms ends also: collectives.plain, samplers.shares" in said
    assert "a: not checked: for a reason: zero.last" in said
    assert "5 error" in said
