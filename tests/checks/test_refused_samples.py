"""The check of refusals: only a run in which every rank raises for what it cannot compute passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpcheck import oracle
from fsdpcheck.checks.refused_samples import assert_refused_alike
from fsdpcheck.execution import Execution, Failure, RankState
from fsdpcheck.findings.violation import Violation
from tests.common.fabricated import SMALL, execution

ANSWER = oracle.answer(SMALL)
TAKEN = execution(ANSWER)


def failed(*ranks: RankState, kind: str = "raised") -> Execution:
    """The run with its ranks left as ``ranks`` say."""
    return replace(TAKEN, ranks=[], failure=Failure(kind, "report", ranks))  # type: ignore[arg-type]


def raised(rank: int, line: str) -> RankState:
    return RankState(rank, "raised", stack=("  File ...", line))


REFUSED = raised(0, "ValueError: no")


def test_ranks_that_all_raise_hold() -> None:
    everyone = failed(raised(0, "ValueError: no"), raised(1, "NotImplementedError: no"), raised(2, "ValueError: no"))
    assert_refused_alike(everyone, TAKEN, "cause")


@pytest.mark.parametrize(
    "refused",
    [
        TAKEN,
        failed(),
        failed(REFUSED, raised(1, "ValueError: no")),
        failed(REFUSED, raised(1, "ValueError: no"), RankState(2, "blocked")),
        failed(REFUSED, raised(1, "ValueError: no"), RankState(2, "finished")),
        failed(REFUSED, raised(1, "ValueError: no"), raised(2, "RuntimeError: shapes")),
        failed(REFUSED, raised(1, "ValueError: no"), raised(2, "ValueError: no"), kind="mismatch"),
    ],
    ids=["a step", "no rank told", "one rank not told", "one blocked", "one finished", "another error", "a mismatch"],
)
def test_anything_else_is_a_finding(refused: Execution) -> None:
    with pytest.raises(Violation):
        assert_refused_alike(refused, TAKEN, "cause")


def test_a_run_that_fails_anyway_says_nothing_of_a_refusal() -> None:
    everyone = failed(REFUSED, raised(1, "ValueError: no"), raised(2, "ValueError: no"))
    with pytest.raises(Violation, match="did not complete"):
        assert_refused_alike(everyone, everyone, "cause")
