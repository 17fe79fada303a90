"""A refusal of a user's model is no finding and no pass; what looks like one and is none stays a finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpcheck import engines
from fsdpcheck.case import UserModelSpec
from fsdpcheck.engines.base import Engine
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.session import run as session
from fsdpcheck.session.plan import Plan
from fsdpcheck.workload.user_model import inspection

TOYS = Path(__file__).parents[1] / "toys"
REFUSING, MODELS = TOYS / "refusing.py", TOYS / "own_models.py"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = engines.open_engine("simulated")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def own() -> UserModelSpec:
    return inspection.inspect(f"{MODELS}:right", f"{MODELS}:batch").own


def _verdict(engine: Engine, kind: str, own: UserModelSpec | None) -> Verdict:
    run = Run(engine, f"{REFUSING}:{kind}", own=own)
    return check_law(chapters()["training.plain"], run, world_sizes=(2,), shrink=False)


@pytest.mark.nightly
def test_a_refusal_on_every_rank_is_neither_a_finding_nor_a_pass(engine: Engine, own: UserModelSpec) -> None:
    verdict = _verdict(engine, "every_rank", own)
    assert (verdict.status, verdict.cases, verdict.finding, verdict.exit_code) == ("not supported", 0, None, 2)
    assert "a layer of this kind cannot be taken" in verdict.reason


@pytest.mark.nightly
def test_a_law_is_no_pass_where_some_cases_are_refused_and_all_others_hold(engine: Engine, own: UserModelSpec) -> None:
    verdict = _verdict(engine, "some", own)
    assert (verdict.status, verdict.exit_code) == ("not supported", 2)
    assert verdict.cases > 0
    assert f"the other {verdict.cases} hold, which is no pass" in verdict.reason


def test_refused_cases_hide_no_finding_of_others(engine: Engine, own: UserModelSpec) -> None:
    verdict = _verdict(engine, "some_and_wrong", own)
    assert (verdict.status, verdict.exit_code) == ("finding", 1)
    assert verdict.finding is not None
    assert verdict.finding.kind == "value"


@pytest.mark.parametrize("kind", ["one_rank", "two_errors", "another_error"])
def test_what_is_no_refusal_stays_a_finding(engine: Engine, own: UserModelSpec, kind: str) -> None:
    verdict = _verdict(engine, kind, own)
    assert (verdict.status, verdict.finding is not None and verdict.finding.kind) == ("finding", "raised")


def test_of_a_model_of_ours_that_an_adapter_accepts_a_refusal_is_a_finding(engine: Engine) -> None:
    assert _verdict(engine, "every_rank", None).status == "finding"


def test_one_refused_case_is_judged_the_same(engine: Engine, own: UserModelSpec) -> None:
    found = _verdict(engine, "another_error", own).finding
    assert found is not None
    run = Run(engine, f"{REFUSING}:every_rank", own=own)
    verdict = check_case(chapters()["training.plain"], run, decode(found.token).case)
    assert (verdict.status, verdict.exit_code) == ("not supported", 2)


def test_a_refusal_ends_one_law_and_not_the_session(engine: Engine) -> None:
    laws = ("training.plain", "invariance.world")
    model = {"model": f"{MODELS}:right", "batch": f"{MODELS}:batch"}
    plan = Plan(adapters=(f"{REFUSING}:every_rank",), laws=laws, world_sizes=(2,), **model)
    told: list[dict[str, object]] = []
    session.run_session(plan, told.append, engine=engine)
    assert [event["status"] for event in told if event["event"] == "verdict"] == ["not supported"] * 2
