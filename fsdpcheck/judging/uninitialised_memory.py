"""Uninitialised memory: whether a finding comes from reading it, and which line asked for that memory.

No NaN is interpreted. The law is judged on the same case again, while all new memory of the ranks holds zeros in place
of the poison (engines/_common/poison.py). If the result differs, it depends on memory that nobody has written.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpcheck.case import Case
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import judge
from fsdpcheck.judging.run import Ran, Run

_SITES = 24
"""Lines tried, each by a run of the case."""

_NAME, _HOLDS = "uninitialised memory", "with zeros there the law holds"


def cause(law: Law, run: Run, case: Case, found: Violation) -> str:
    """The cause of what ``law`` found on ``case``, if that is uninitialised memory; else "". Runs the case again.

    Raises whatever a run raises that is no finding.
    """
    with_zeros = _judged(law, run, case, "zeros")
    if _told(with_zeros) == _told(found) or _told(_judged(law, run, case, "poison")) != _told(found):
        return ""  # no difference, or one that comes and goes by itself
    site = _site(law, run, case, _told(with_zeros))
    what = (
        f"what {site} got from torch.empty or its like" if site else "what torch.empty, storage.resize_ or C++ returned"
    )
    also = _HOLDS if with_zeros is None else f"with zeros there the law breaks too: got {with_zeros.got}"
    also += "" if with_zeros is None or not with_zeros.wanted else f", wanted {with_zeros.wanted}"
    return f"{_NAME}: {what} is read before it is written; {also}"


def _told(found: Violation | None) -> tuple[str, str, str] | None:
    return (found.what, found.got, found.where) if found is not None else None


def _site(law: Law, run: Run, case: Case, wanted: tuple[str, str, str] | None) -> str:
    """The one line whose memory alone must hold zeros for the law to say ``wanted``; "" if none does, or several."""
    ran = Ran()
    _judged(law, run, case, "noted", ran)
    ranks = ran.newest.ranks if ran.newest else []
    sites = list(dict.fromkeys(site for own in ranks for site in own.allocations if site))[:_SITES]
    enough = [site for site in sites if _told(_judged(law, run, case, f"zeros at {site}")) == wanted]
    return enough[0] if len(enough) == 1 else ""


def _judged(law: Law, run: Run, case: Case, memory: str, ran: Ran | None = None) -> Violation | None:
    try:
        judge(law, case, replace(run, memory=memory, ran=ran or Ran()))
    except Violation as violation:
        return violation
    return None
