"""What the laws say of a fault: those that its adapter promises, in the profile ``quick``, until one kills it."""

from __future__ import annotations

import time
from typing import Any, Final

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.studies.faults.matrix import Matrix
from fsdpcheck.studies.faults.origins import Planted
from tests.mechanisms.planting import Mechanism

MODULE: Final = "benchmarks.side_by_side.faults"
_ANSWERS: Final = {
    "killed": "found",
    "raises at once": "found",
    "never ran": "not executed",
    "not asked": "not executed",
}

_FIRST: Final = {
    "sample draw": "samplers.*", "noise": "[np][or]i*", "global norm": "global-norm.*", "memory": "lifecycle.*",
    "collective": "collectives.*", "output": "features.*",
}  # fmt: skip
"""Quantity that goes wrong first -> laws that run first, which saves time and decides nothing."""


class Laws:
    """One engine for all faults. A law that breaks in the same case without the fault kills nothing."""

    def __init__(self) -> None:
        self._engine = SimulatedEngine()
        self._matrix = Matrix(profile="quick", engine=self._engine)

    def answer(self, fault: Mechanism) -> dict[str, Any]:
        """Found and by which law, missed, or not executed; with the outcome in the words of ``fsdpcheck faults``."""
        started = time.monotonic()
        first = _FIRST.get(fault.quantity, "")
        planted = Planted(fault.name, (f"{MODULE}:{fault.name}",), (fault.adapter,), fault.what, first)
        row = self._matrix.row(planted)
        kill = row.kills[0] if row.kills else None
        return {
            "answer": _ANSWERS.get(row.outcome, "missed"), "by": kill.law if kill else "", "outcome": row.outcome,
            "what": kill.what if kill else "", "token": kill.token if kill else "", "laws": row.laws,
            "cases": row.cases, "note": row.note[:300], "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip

    def close(self) -> None:
        self._engine.close()
