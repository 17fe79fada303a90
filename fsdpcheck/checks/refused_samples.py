"""Checks of what an implementation must not take: all ranks raise together, and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable

from fsdpcheck.checks._read import completed
from fsdpcheck.execution import Execution, RankState
from fsdpcheck.findings.violation import Violation

REFUSALS = ("ValueError", "NotImplementedError")
"""What says that something cannot be done; anything else that is raised is a mistake of another kind."""


def assert_refused_alike(refused: Execution, taken: Execution, cause: str) -> None:
    """Every rank of ``refused`` raised one of REFUSALS, and the run ``taken`` completed.

    So it is the difference between the two that is refused; ``cause`` says what it is, where it is not.
    """
    completed(taken)
    wanted = f"every rank raises {' or '.join(REFUSALS)}"
    failure = refused.failure
    if failure is None:
        where = "no rank raised"
        raise Violation("what cannot be computed is computed", got="a step", wanted=wanted, where=where, cause=cause)
    everyone = len(failure.ranks) == refused.request.training.world_size
    if failure.kind != "raised" or not everyone or not all(_refuses(rank) for rank in failure.ranks):
        stood = ", ".join(f"rank {state.rank} {state.state}" for state in failure.ranks)
        raise Violation("ranks do not refuse alike", got=failure.text, wanted=wanted, where=stood, cause=cause)


def refused(execution: Execution, without: Callable[[], Execution]) -> bool:
    """Whether some rank raised, which is to say that something cannot be done; then the run ``without`` it completed.

    Raises Violation where that one did not complete either: what is raised anyway refuses nothing.
    """
    if execution.failure is None or execution.failure.kind != "raised":
        return False
    completed(without())
    return True


def _refuses(rank: RankState) -> bool:
    return rank.state == "raised" and any(line.startswith(REFUSALS) for line in rank.stack)
