"""A session on the ranks of torchrun: rank 0 draws, judges and reports; the others serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fsdpcheck.engines import torchrun
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import UsageError
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.worker import fork_servers_of, told_session


def session(plan: Plan, listen: Callable[[Ledger, Mapping[str, Any]], None]) -> Ledger | None:
    """Run ``plan`` with the world size of torchrun; None on the ranks that served. Raises UsageError."""
    fork_servers_of(plan.adapters)
    if torchrun.rank() != 0:
        torchrun.serve()
        return None
    engine = torchrun.TorchrunEngine(budget_seconds=plan.budget)
    try:
        return _driven(_fitted(plan), engine, listen)
    finally:
        engine.close()


def _fitted(plan: Plan) -> Plan:
    """The plan on as many ranks as there are. Raises UsageError where others were asked for."""
    given = (torchrun.world_size(),)
    if plan.world_sizes not in ((), given):
        got = ", ".join(map(str, plan.world_sizes))
        raise UsageError(
            f"--world-size under torchrun: the number of ranks is torchrun's\n  got     {got}\n"
            f"  wanted  {given[0]}\n  next    leave --world-size out, or choose another --nproc-per-node"
        )
    return replace(plan, engine=TORCHRUN, world_sizes=given)


def _driven(plan: Plan, engine: torchrun.TorchrunEngine, listen: Callable[[Ledger, Mapping[str, Any]], None]) -> Ledger:
    ledger = Ledger(plan)

    def emit(event: dict[str, Any]) -> None:
        ledger.take(event)
        listen(ledger, event)

    emit(told_session(plan, emit, engine=engine))
    return ledger
