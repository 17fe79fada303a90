"""Refusals: an implementation that says it cannot take a user's own model has trained nothing wrong, nor right.

Of the harness's models it declares what it accepts, so that raising on those is a finding. A user's model may hold what
no declaration has a word for.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdpcheck.execution import Execution, Failure, RankState

_TOLD = NotImplementedError.__name__


def refused(execution: Execution) -> str:
    """The report of a run in which every rank raised NotImplementedError at one place on a user's model; else "".

    One rank that raises while another goes on is a finding, whatever it raises: the other waits for it.
    """
    failure = execution.failure
    if failure is None or failure.kind != "raised" or execution.request.case.model.own is None:
        return ""
    return failure.text if _alike(failure) else ""


def verdict_text(reports: Iterable[str], refused: int, judged: int) -> str:
    """Why a law is not supported, with the most frequent report."""
    held = f"the other {judged} hold, which is no pass" if judged else "none was judged"
    said = next(iter(reports), "").replace("\n", "\n  ")
    return (
        f"the adapter refuses {refused} of {refused + judged} cases of your model by {_TOLD}; {held}\n  {said}\n"
        "  next    do as it says, or leave such laws out (--law); what raises is no finding of a wrong step"
    )


def _alike(failure: Failure) -> bool:
    return len({rank.where for rank in failure.ranks}) == 1 and all(_refuses(rank) for rank in failure.ranks)


def _refuses(rank: RankState) -> bool:
    return rank.state == "raised" and any(line.startswith(_TOLD) for line in rank.stack)
