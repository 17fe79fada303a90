"""The check of refusals: only a run in which every rank raises for what it cannot compute passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck import oracle
from fsdpcheck.checks.refused import assert_refused_alike
from fsdpcheck.errors import Violation
from fsdpcheck.execution import Execution, Failure, RankState
from tests.fabricated import SMALL, execution

ANSWER = oracle.answer(SMALL)
TAKEN = execution(ANSWER)


def failed(*ranks: RankState, kind: str = "raised") -> Execution:
    """The run with its ranks left as ``ranks`` say."""
    return replace(TAKEN, ranks=[], failure=Failure(kind, "report", ranks))  # type: ignore[arg-type]


def raised(rank: int, line: str) -> RankState:
    return RankState(rank, "raised", stack=("  File ...", line))


def test_ranks_that_all_raise_hold() -> None:
    assert_refused_alike(failed(raised(0, "ValueError: no"), raised(1, "NotImplementedError: no")), TAKEN, "cause")


@pytest.mark.parametrize(
    "refused",
    [
        TAKEN,
        failed(raised(0, "ValueError: no"), RankState(1, "blocked")),
        failed(raised(0, "ValueError: no"), RankState(1, "finished")),
        failed(raised(0, "ValueError: no"), raised(1, "RuntimeError: shapes")),
        failed(raised(0, "ValueError: no"), raised(1, "ValueError: no"), kind="mismatch"),
    ],
    ids=["a step", "one blocked", "one finished", "another error", "a mismatch"],
)
def test_anything_else_is_a_finding(refused: Execution) -> None:
    with pytest.raises(Violation):
        assert_refused_alike(refused, TAKEN, "cause")


def test_a_run_that_fails_anyway_says_nothing_of_a_refusal() -> None:
    everyone = failed(raised(0, "ValueError: no"), raised(1, "ValueError: no"))
    with pytest.raises(Violation, match="did not complete"):
        assert_refused_alike(everyone, everyone, "cause")
