"""A session told as events: their order, what is confirmed on real processes, and what an adapter error ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.engines._common.metal import KINDS
from fsdpcheck.errors import UsageError
from fsdpcheck.findings.tokens import decode
from fsdpcheck.session import run
from fsdpcheck.session.plan import Plan
from tests.common.commands import LAWS, TOY, TOYS


def _events(*laws: str, **more: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    names = tuple(f"toy.{name}" for name in laws)
    run.run_session(
        Plan(**{"adapters": (TOY,), "laws_from": (LAWS,), "laws": names, "world_sizes": (1, 2), **more}), events.append
    )
    return events


def _kinds(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of events, repeats left out."""
    kinds = [event["event"] for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


def test_events_come_in_order() -> None:
    events = _events("completes", "secret", confirm=False)
    assert _kinds(events) == ["plan", "law", "case", "sources", "verdict", "law", "sources", "verdict"]
    assert events[0]["laws"] == ["toy.completes", "toy.secret"]
    assert events[0]["guarantees"]["toy.completes"] == "Every step comes to its end."


def test_findings_are_run_again_on_real_processes() -> None:
    events = _events("agrees", "simulated")
    told = {event["law"]: (event["confirmed"], event["note"]) for event in events if event["event"] == "confirmation"}
    assert told["toy.agrees"][0] == "yes"
    confirmed, note = told["toy.simulated"]
    assert confirmed == "no"
    assert note.startswith("on gloo: holds; simulated ranks share module globals")


def test_a_finding_is_replayed_from_its_token() -> None:
    (verdict,) = [event for event in _events("agrees", confirm=False) if event["event"] == "verdict"]
    token = decode(verdict["finding"]["token"])
    again = run.replayed(token, "simulated")
    assert again.finding is not None
    assert (again.finding.got, again.finding.where) == (verdict["finding"]["got"], verdict["finding"]["where"])


def test_ranks_that_an_adapter_does_not_take_are_named(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.py"
    narrow.write_text(
        "from dataclasses import replace\nfrom fsdpcheck.adapters import load\n"
        'adapter = load("reference")\nadapter.features = replace(adapter.features, max_world_size=2)\n'
    )
    plan = Plan((f"{narrow}:adapter",), ("training.plain",), world_sizes=(1, 2, 4, 8))
    events: list[dict[str, Any]] = []
    run.run_session(plan, events.append, pairs=iter(()))
    assert events[0]["notes"] == (f"no law is judged on 4, 8 ranks: {narrow}:adapter takes at most 2",)
    events.clear()
    run.run_session(replace(plan, world_sizes=(1, 2)), events.append, pairs=iter(()))
    assert events[0]["notes"] == ()


def test_pairs_that_are_given_are_all_that_is_checked() -> None:
    events: list[dict[str, Any]] = []
    plan = Plan(adapters=(TOY,), laws=("toy.completes", "toy.secret"), world_sizes=(1,), laws_from=(LAWS,))
    run.run_session(plan, events.append, pairs=iter([("toy.secret", TOY)]))
    assert [event["law"] for event in events if event["event"] == "verdict"] == ["toy.secret"]


def test_an_adapter_that_cannot_take_a_step_is_asked_only_what_is_asked_first() -> None:
    laws = ("collectives.plain", "invariance.world", "norms.scaling", "training.plain")
    events: list[dict[str, Any]] = []
    run.run_session(Plan((f"{TOYS / 'stepless.py'}:Stepless",), laws, world_sizes=(1, 2)), events.append)
    verdicts = [event for event in events if event["event"] == "verdict"]
    told = {verdict["law"]: (verdict["status"], verdict["reason"].partition(":")[0]) for verdict in verdicts}
    assert list(told)[:2] == ["training.plain", "collectives.plain"]
    assert told["invariance.world"] == ("error", "not checked")
    assert told["norms.scaling"][0] == "not promised"
    assert [event["law"] for event in events if event["event"] == "law"] == [*list(told)[:2], "norms.scaling"]
    assert "without step, parameters" in verdicts[0]["reason"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"laws": ("no.such",)}, "no law matches"),
        (
            {"engine": "quantum"},
            f"unknown engine 'quantum'; known: {', '.join(KINDS)}",
        ),
        ({"installs": ("averaged_twise",)}, "Did you mean 'averaged_twice'"),
    ],
)
def test_a_plan_that_cannot_begin_raises(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _events("completes", **more)


def test_a_planted_fault_is_found_by_the_law_that_must_catch_it() -> None:
    more = {"laws": ("training.plain",), "adapters": ("reference",), "installs": ("averaged_twice",), "confirm": False}
    (verdict,) = [event for event in _events(**more) if event["event"] == "verdict"]
    assert verdict["status"] == "finding"
    assert decode(verdict["finding"]["token"]).installs == ("fsdpcheck.impl.faults:averaged_twice",)


def test_versions_are_plain_text_which_xdist_can_send() -> None:
    assert {type(version) for version in run.versions().values()} == {str}
