"""A session on the ranks of torchrun: rank 0 draws, judges and reports; the others serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fsdpcheck.engines import torchrun
from fsdpcheck.ledger import Ledger
from fsdpcheck.plan import Plan
from fsdpcheck.worker import told_session


def session(plan: Plan, listen: Callable[[Ledger, Mapping[str, Any]], None]) -> Ledger | None:
    """Run ``plan`` with the world size of torchrun; None on the ranks that served. Raises UsageError."""
    if torchrun.rank() != 0:
        torchrun.serve()
        return None
    engine = torchrun.TorchrunEngine(budget_seconds=plan.budget)
    try:
        return _driven(_fitted(plan), engine, listen)
    finally:
        engine.close()


def _fitted(plan: Plan) -> Plan:
    return replace(plan, engine="torchrun", world_sizes=plan.world_sizes or (torchrun.world_size(),))


def _driven(plan: Plan, engine: torchrun.TorchrunEngine, listen: Callable[[Ledger, Mapping[str, Any]], None]) -> Ledger:
    ledger = Ledger(plan)

    def emit(event: dict[str, Any]) -> None:
        ledger.take(event)
        listen(ledger, event)

    emit(told_session(plan, emit, engine=engine))
    return ledger
