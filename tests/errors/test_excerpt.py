"""What an implementation says is kept in bounded length and printed so that no terminal obeys it."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import fields, replace

import pytest

from fsdpcheck.errors import AdapterError, excerpt
from fsdpcheck.errors.excerpt import MOST, WHOLE
from fsdpcheck.execution.outcomes import adapter_failure, ending
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.pytest_plugin import outcome
from fsdpcheck.report import summary as on_paper
from fsdpcheck.report.progress import progress
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan

RED = "\x1b[31mred\x07\r\x9b\u202eX\ud800"
SEEN = r"\x1b[31mred\x07\r\x9b\u202eX\ud800"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class MuteAdapter(AdapterError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


Empty = type("", (Exception,), {"__module__": "builtins"})


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_long_text_keeps_its_head_and_tail_and_says_what_is_left_away() -> None:
    text = "a" * 10_000_000 + "z" * 5_000_000
    short = excerpt.excerpt(text)
    assert short == "a" * 2000 + "\n... 14,996,000 characters left away ...\n" + "z" * 2000
    assert excerpt.excerpt("x" * MOST) == "x" * MOST
    assert len(excerpt.excerpt("x" * (MOST + 1))) < MOST + 60


def test_what_a_rank_raises_is_plain_data_of_bounded_length_whatever_it_is() -> None:
    """Huge, empty, without words, as a cause, with a name or a file without end, in endless frames."""
    named = type("N" * 1_000_000, (Exception,), {})
    caused = _raised(ValueError("small"))
    caused.__cause__ = RuntimeError("y" * 1_000_000)
    noted = _raised(ValueError("small"))
    noted.add_note("n" * 1_000_000)

    def endless() -> None:
        endless()

    kept = sys.getrecursionlimit()
    try:
        endless()
    except RecursionError as error:
        deep = error
    assert sys.getrecursionlimit() == kept
    far: list[BaseException] = []
    try:
        exec(compile("1 / 0", "f" * 1_000_000, "exec"))
    except ZeroDivisionError as error:
        far.append(error)
    errors = [RuntimeError("\x1b[31mX\n" * 300_000), Empty(), Empty("x"), Mute(), named("x"), MuteAdapter()]
    for error in [*map(_raised, errors), caused, noted, deep, *far]:
        state = ending(1, error)
        texts = [value for value in vars_of(state) if isinstance(value, str)]
        assert all(len(text) < 4 * MOST for text in texts), type(error)
        assert state.exception
        assert state.message
    assert ending(1, _raised(Empty())).message == "<a class without a name>"
    assert "str() failed" in ending(1, _raised(Mute())).text
    failure = adapter_failure(1, MuteAdapter())
    assert failure is not None
    assert failure.text == "<MuteAdapter, whose __str__ raises RuntimeError>"


def vars_of(state: object) -> list[object]:
    return [getattr(state, field.name) for field in fields(state)]  # type: ignore[arg-type]


def _verdict(text: str) -> Verdict:
    texts = {field.name: text for field in fields(Finding) if field.type == "str"}
    finding = Finding(**{**texts, "case": {}, "token": "v2:none", "confirmed": "no"})
    return Verdict(f"law{text}", f"adapter{text}", "finding", 1, finding=finding, exit_code=1)


def test_every_text_of_a_verdict_is_bounded_but_its_token() -> None:
    verdict = replace(_verdict("x" * 10 * WHOLE), reason="r" * 10 * WHOLE).bounded()
    assert verdict.finding is not None
    for name in ("place", "what", "got", "wanted", "where", "cause", "note", "when", "stage"):
        assert len(getattr(verdict.finding, name)) < WHOLE + 60, name
    assert len(verdict.reason) < WHOLE + 60
    small = _verdict("x")
    assert small.bounded() == small


def test_nothing_that_a_terminal_obeys_is_printed_raw_and_the_report_keeps_it() -> None:
    verdict = _verdict(RED)
    error = replace(_verdict(RED), law=f"other{RED}", status="error", reason=RED, finding=None)
    unpromised = replace(error, law=f"third{RED}", status="not promised")
    verdicts = {(each.law, each.adapter): each for each in (verdict, error, unpromised)}
    laws = tuple(each.law for each in verdicts.values())
    ledger = Ledger(Plan((verdict.adapter,)), laws, verdicts=verdicts, notes=(RED,), errors=[(RED, 3)])
    ledger.unaccepted = {verdict.adapter: [RED]}
    printed = on_paper.ending(ledger, lambda text, colour: text)
    assert OBEYED.findall(printed) == []
    assert printed.count(SEEN) > 20
    for judged in verdicts.values():
        with pytest.raises((pytest.fail.Exception, pytest.skip.Exception)) as told:
            outcome.conclude(judged)
        assert OBEYED.findall(str(told.value)) == []
    assert ledger.verdicts[verdict.law, verdict.adapter] == verdict
    assert RED in json.loads(json.dumps(verdict.to_data()))["finding"]["got"]


def test_progress_prints_nothing_that_a_terminal_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown, verdict = progress(), _verdict(RED)
    shown(Ledger(Plan(("x",))), {"event": "verdict", **verdict.to_data()})
    shown(Ledger(Plan(("x",))), {"event": "note", "text": RED})
    assert OBEYED.findall(sys.stderr.getvalue()) == []
    assert sys.stderr.getvalue().count(SEEN) == 3


def test_an_ordinary_text_is_printed_as_it_is() -> None:
    for text in ("tabs\tand\nlines", "Grüße, 数学, ∑ ≤ π, 🙂", "  file.py:3 in f: x = '\\n'"):
        assert excerpt.visible(text) == text
