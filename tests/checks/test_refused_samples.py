"""The check of refusals: only a run in which every rank raises for what it cannot compute passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from fsdpcheck import oracle
from fsdpcheck.checks.refused_samples import assert_refused_alike, refused
from fsdpcheck.execution import Execution, Failure, RankState
from fsdpcheck.findings.violation import Violation
from tests.common.fabricated import SMALL, execution
from tests.common.tables import each


@cache
def taken() -> Execution:
    return execution(oracle.answer(SMALL))


def failed(*ranks: RankState, kind: str = "raised") -> Execution:
    """The run with its ranks left as ``ranks`` say."""
    return replace(taken(), ranks=[], failure=Failure(kind, "report", ranks))  # type: ignore[arg-type]


def raised(rank: int, line: str) -> RankState:
    return RankState(rank, "raised", stack=("  File ...", line))


REFUSED = raised(0, "ValueError: no")


def test_ranks_that_all_raise_hold() -> None:
    everyone = failed(raised(0, "ValueError: no"), raised(1, "NotImplementedError: no"), raised(2, "ValueError: no"))
    assert_refused_alike(everyone, taken(), "cause")


SECOND = raised(1, "ValueError: no")
OTHERWISE: dict[str, Callable[[], Execution]] = {
    "a step": taken,
    "no rank told": failed,
    "one rank not told": lambda: failed(REFUSED, SECOND),
    "one blocked": lambda: failed(REFUSED, SECOND, RankState(2, "blocked")),
    "one finished": lambda: failed(REFUSED, SECOND, RankState(2, "finished")),
    "another error": lambda: failed(REFUSED, SECOND, raised(2, "RuntimeError: shapes")),
    "a mismatch": lambda: failed(REFUSED, SECOND, raised(2, "ValueError: no"), kind="mismatch"),
}


@each("what", OTHERWISE)
def test_anything_else_is_a_finding(what: str) -> None:
    with pytest.raises(Violation):
        assert_refused_alike(OTHERWISE[what](), taken(), "cause")


def test_a_run_that_fails_anyway_says_nothing_of_a_refusal() -> None:
    everyone = failed(REFUSED, raised(1, "ValueError: no"), raised(2, "ValueError: no"))
    with pytest.raises(Violation, match="did not complete"):
        assert_refused_alike(everyone, everyone, "cause")


def test_what_some_rank_raised_is_refused_and_nothing_else() -> None:
    assert refused(failed(REFUSED, RankState(1, "blocked")), taken)
    assert not refused(taken(), taken)
    assert not refused(failed(REFUSED, kind="mismatch"), taken)
    with pytest.raises(Violation, match="did not complete"):  # what is raised anyway refuses nothing
        refused(failed(REFUSED), lambda: failed(REFUSED))
