"""Checks of what an implementation must not take: all ranks raise together, and nobody is left waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdpcheck.checks._read import completed
from fsdpcheck.checks.training import assert_parameters_equal, right
from fsdpcheck.execution import Execution, RankState
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer

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


def assert_refused_or_trained(
    execution: Execution,
    answer: Answer,
    without: Callable[[], tuple[Execution, Answer]],
    change: str,
    otherwise: str,
) -> None:
    """Some rank raised, whatever it is called, or parameters are the single device's after every step, bit for bit.

    ``without``: the case as it was drawn, which completes where the ``change`` of it is refused. ``otherwise``: the
    cause where no stronger one fits, and the case as it was drawn is right.
    """
    if not refused(execution, lambda: without()[0]):
        with in_words(change, lambda: otherwise if right(*without()) else ""):
            assert_parameters_equal(execution, answer)


@contextmanager
def in_words(change: str, otherwise: Callable[[], str] = str) -> Iterator[None]:
    """A violation inside says too what was changed of the case; ``otherwise`` gives the cause where no stronger one
    fits, or ""."""
    try:
        yield
    except Violation as found:
        where, diagnose = f"{found.where}; {change}", found.diagnose

        def causes() -> Causes | None:
            known = diagnose() if diagnose is not None else None
            return [*(known or ()), Cause(change, text, PATTERN)] if (text := otherwise()) else known

        said = found.cause if diagnose is None else ""
        raise Violation(found.what, got=found.got, wanted=found.wanted, where=where, cause=said or causes) from None


def _refuses(rank: RankState) -> bool:
    return rank.state == "raised" and any(line.startswith(REFUSALS) for line in rank.stack)
