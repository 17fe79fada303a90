"""Laws that pytest collects itself, judged in its own process, which imports no implementation. Imports torch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import get_args

from fsdpcheck.case import Trait
from fsdpcheck.engines.base import Engine
from fsdpcheck.judging import model_process
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.loading import provenance
from fsdpcheck.pytest_plugin.own_tests import Told
from fsdpcheck.session.confirmation import Confirming
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.run import Check, versions


class Collected:
    """Judges one law after the other as a session does, findings run again on real ranks among it."""

    def __init__(self, plan: Plan, engine: Engine, stack: ExitStack) -> None:
        seen = model_process.inspected(*plan.own[:3], plan.units, plan.optimizer) if plan.model else None
        self._plan, self._ledger = plan, Ledger(plan)
        run = Run(engine, plan.adapters[0], avoid=frozenset(plan.avoid))
        self._run = run.of(seen, plan.real) if seen else run
        loaded = provenance.Loaded((*plan.adapters, *plan.own))
        self._check = Check(plan, self._run, self._ledger.take, Confirming(stack, plan), loaded)

    def run(self, ref: str) -> Run:
        """The run of one adapter."""
        return replace(self._run, adapter_ref=ref)

    def judge(self, law: Law, ref: str) -> Told:
        """The verdict, its findings confirmed where they can be."""
        self._check(law, ref)
        accepts = self.run(ref).declared.features.accepts
        unaccepted = sorted(frozenset[str](get_args(Trait)) - accepts)
        return Told(self._ledger.verdicts[law.name, ref], self._plan, unaccepted, versions())
