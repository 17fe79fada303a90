"""Judging: rows of the ledger, one after another; a check that raises is shown as an error and hides no other."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdpcheck.studies.claims.lab import Lab
from fsdpcheck.studies.claims.registry import Claim

ERROR = "error"


@dataclass(frozen=True)
class Row:
    """One row as measured. ``verdict`` may be ERROR; ``measured`` is then what was raised."""

    id: str
    statement: str
    verdict: str
    measured: str
    trace: str = ""


def judge(claims: Iterable[Claim], on_claim: Callable[[Claim], None] = lambda claim: None) -> list[Row]:
    """Every row, judged on simulated ranks of one lab; ``on_claim`` is told before each."""
    lab, rows = Lab(), []
    try:
        for claim in claims:
            on_claim(claim)
            rows.append(_judged(claim, lab))
    finally:
        lab.close()
    return rows


def _judged(claim: Claim, lab: Lab) -> Row:
    try:
        outcome = claim.check(lab)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(claim.id, claim.statement, ERROR, told, traceback.format_exc())
    return Row(claim.id, claim.statement, outcome.verdict, outcome.measured)
