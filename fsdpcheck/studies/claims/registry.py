"""Claim: one row of the ledger, a statement and the function that measures it. Registered by decorator, found by scan.

A check measures, by running ranks or by counting, and forms its verdict from the numbers with the functions below; no
verdict is written down. Times are measured on a GPU alone: elsewhere, where a claim is about time, its check counts
operations, calls and bytes, states the constants of its model, or says that a GPU is needed.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpcheck.errors import UsageError

if TYPE_CHECKING:
    from fsdpcheck.studies.claims.lab import Lab

HOLDS, REFUTED, NEEDS_GPU = "holds", "refuted", "needs a GPU"
_ONLY_IF = "holds only if "


@dataclass(frozen=True)
class Outcome:
    """``verdict``: HOLDS, REFUTED, NEEDS_GPU or "holds only if ..."; ``measured``: the numbers, in a sentence."""

    verdict: str
    measured: str

    def __post_init__(self) -> None:
        if self.verdict not in (HOLDS, REFUTED, NEEDS_GPU) and not self.verdict.startswith(_ONLY_IF):
            raise ValueError(f"got the verdict {self.verdict!r}, wanted holds, refuted, needs a GPU, holds only if ...")


Check = Callable[["Lab"], Outcome]


@dataclass(frozen=True)
class Claim:
    """A row: its id in the ledger ("A1"), what is claimed, in a sentence, and what measures it."""

    id: str
    statement: str
    check: Check

    @property
    def section(self) -> str:
        return self.id[0]


ROWS: dict[str, Claim] = {}


def claim(id: str, statement: str) -> Callable[[Check], Check]:
    """Register a check under the id of its row. Raises RuntimeError if the id is taken by another."""

    def register(check: Check) -> Check:
        if id in ROWS and ROWS[id].check.__qualname__ != check.__qualname__:
            other = ROWS[id].check.__name__
            raise RuntimeError(f"two checks are registered as claim {id}: {other} and {check.__name__}")
        ROWS[id] = Claim(id, statement, check)
        return check

    return register


def verdict(holds: bool) -> str:
    """The verdict on a claim that was measured as it stands."""
    return HOLDS if holds else REFUTED


def only_if(condition: str, *, under_it: bool, otherwise: bool) -> str:
    """The verdict on a claim measured twice: where ``condition`` is met, and where it is not."""
    if not under_it:
        return REFUTED
    return HOLDS if otherwise else _ONLY_IF + condition


def all_claims() -> list[Claim]:
    """Every row, in the order of the ledger; the modules ``section_*`` of this package are imported for it."""
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name.startswith("section_"):
            importlib.import_module(f"{__package__}.{info.name}")
    return sorted(ROWS.values(), key=lambda row: _order(row.id))


def chosen(ids: Iterable[str]) -> list[Claim]:
    """The rows of these ids, or of whole sections ("A"); all if none is given. Raises UsageError for an unknown id."""
    rows, wanted = all_claims(), list(ids)
    unknown = [id for id in wanted if not any(id in (row.id, row.section) for row in rows)]
    if unknown:
        raise UsageError(
            f"there is no claim {', '.join(unknown)}; there are {', '.join(row.id for row in rows)},"
            " and a section's letter stands for all of its rows"
        )
    return [row for row in rows if not wanted or row.id in wanted or row.section in wanted]


def _order(id: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"([A-Z])(\d+)(.*)", id)
    if found is None:
        raise RuntimeError(f"a claim is named {id!r}, wanted a section's letter and a number, such as A1")
    return found[1], int(found[2]), found[3]
