"""What a session says of several mistakes in one implementation: which are reported, and what else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

planted_roots = pytest.importorskip("benchmarks.planted_roots", reason="only a checkout has the benchmarks")
from benchmarks.planted_roots import EIGHT, Told, session  # noqa: E402
from fsdpcheck.findings.verdict import Finding  # noqa: E402
from fsdpcheck.impl import faults  # noqa: E402

FAULT = "global_norm_of_own_shard"


def test_the_planted_faults_are_there_and_have_causes() -> None:
    assert len(EIGHT) == len(set(EIGHT)) == 8
    assert all(faults.ALL[name].cause for name in EIGHT)


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    return session((FAULT,), "quick", "global-norm.returned")


def test_a_mistake_is_reported_by_its_cause_and_another_is_missed(found: list[Finding]) -> None:
    told = Told((FAULT, "hooks_left_on_the_loss"), found)
    assert told.missed == ["hooks_left_on_the_loss"]
    assert told.extra == []
    first, *others = told.lines()
    assert first.endswith("1 of 2 in one session, 1 roots reported")
    assert others == [f"  {FAULT}: 1 root(s), by global-norm.returned", "  hooks_left_on_the_loss: not reported"]


def test_a_root_of_no_planted_mistake_is_extra(found: list[Finding]) -> None:
    stranger = replace(found[0], cause="something else", law="training.plain")
    told = Told((FAULT,), [*found, stranger])
    assert [one.cause for one in told.extra] == ["something else"]
    assert [*told.lines()][-1] == "  extra, by training.plain: something else"
