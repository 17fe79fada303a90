"""Confirmation: what a session has found on simulated ranks, run again on real ones."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from fsdpcheck import engines
from fsdpcheck.case import Case, KernelCase, from_json
from fsdpcheck.engines._common import metal
from fsdpcheck.engines.base import Engine
from fsdpcheck.errors import FINDING, FsdpcheckError
from fsdpcheck.findings.verdict import Confirmation, Finding, Verdict
from fsdpcheck.judging import nondeterminism
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.session.plan import Plan

CONFIRMING: Final = ("processes", "nccl")
"""Kinds of ranks on which findings are run again: gloo's, and NCCL's where there is a GPU for each."""
TRIED = 3
"""Most cases of a law that are run again on processes because simulated ranks share what they write to."""
_NAMED = 3
"""Most names of such that are told."""
_SHARED = "; simulated ranks share module globals: name those that real ranks have apiece in Features.rank_local"


def opened(stack: ExitStack, name: str, budget: float | None) -> Engine:
    """An engine that is closed when the stack is left."""
    engine = engines.open_engine(name, budget)
    stack.callback(engine.close)
    return engine


@dataclass(frozen=True)
class Confirmed:
    """Of a finding: whether other ranks break its law too, what else must be known, and which do."""

    confirmed: Confirmation
    note: str = ""
    on: tuple[str, ...] = ()


class Confirming:
    """Runs cases again on real ranks, which start when the first needs them: minimal ones that break a law, and some
    that hold where simulated ranks share what they write to."""

    def __init__(self, stack: ExitStack, plan: Plan) -> None:
        self._stack, self._plan = stack, plan
        self._engines: dict[str, Engine] = {}

    def __call__(self, found: Law, finding: Finding) -> dict[str, Any]:
        told = self._confirmation(found, finding)
        notes = [text for text in (finding.note, told.note) if text]
        return {
            "token": finding.token, "confirmed": told.confirmed, "confirmed_on": told.on, "note": "; ".join(notes)
        }  # fmt: skip

    def _confirmation(self, found: Law, finding: Finding) -> Confirmed:
        case = from_json(json.dumps(finding.case))
        if isinstance(case, KernelCase):
            return Confirmed("not tried", "kernels run in a process of their own, without ranks")
        if not metal.is_simulated(finding.engine):
            return Confirmed("yes", "found there", (_ranks(finding.engine, case),))
        if not self._plan.confirm:
            return Confirmed("not tried", "--no-confirm")
        kinds = [kind for kind in CONFIRMING if not metal.of(kind).lacks(case.world_size)]
        return _together([self._tried(found, finding, case, kind) for kind in kinds])

    def _tried(self, found: Law, finding: Finding, case: Case, kind: str) -> Confirmed:
        try:
            run = Run(self._real(kind), finding.adapter, self._plan.installs)
            verdict = check_case(found, run, case, diagnose=False)
            varies = verdict.finding is None and run.asked is not None and nondeterminism.varies(run, run.asked)
        except FsdpcheckError as error:
            return Confirmed("not tried", str(error))
        confirmed, note = _compared(finding, verdict, varies, metal.of(kind).words)
        return Confirmed(confirmed, note, (_ranks(kind, case),) if confirmed == "yes" else ())

    def _real(self, kind: str = CONFIRMING[0]) -> Engine:
        if kind not in self._engines:
            self._engines[kind] = opened(self._stack, kind, self._plan.budget)
        return self._engines[kind]

    def held(self, found: Law, run: Run, verdict: Verdict, cases: list[Case]) -> Verdict:
        """``verdict``, that ``found`` holds, with what real ranks say of it where simulated ones share what they write.

        Cases on the fewest of several ranks are run again, ``TRIED`` at most. One that breaks the law is its finding.
        """
        shared = ", ".join(list(run.ran.shared)[:_NAMED]) + ", ..." * (len(run.ran.shared) > _NAMED)
        several = [case for case in dict.fromkeys(cases) if case.world_size > 1]
        fewest = min((case.world_size for case in several), default=0)
        chosen = [case for case in several if case.world_size == fewest]  # some of them are not exact, and run nowhere
        tried, untried = 0, "" if self._plan.confirm else "--no-confirm"
        for case in chosen if not untried else ():
            if tried == TRIED:
                break
            try:
                there = check_case(found, replace(run.on(self._real()), avoid=run.avoid), case, diagnose=False)
            except FsdpcheckError as error:
                untried = str(error)
                break
            if there.finding is not None:
                cause = f"holds on simulated ranks alone, which share {shared}: real ranks have one each"
                broken = replace(there.finding, cause=cause, note="not made smaller")
                return replace(verdict, status="finding", finding=broken, exit_code=FINDING).bounded()
            tried += there.status == "holds"
        told = f"simulated ranks share {shared}, and write to it"
        told += f"; {tried} of these cases held on gloo processes too" if tried else "; not tried on real ranks"
        told += f": {untried}" if untried else ""
        return replace(verdict, reason="; ".join(text for text in (verdict.reason, told) if text)).bounded()


def _compared(finding: Finding, verdict: Verdict, varies: bool, ranks: str) -> tuple[Confirmation, str]:
    there = verdict.finding
    if there is None and varies:
        return "no", f"on {ranks}: {verdict.status}, but run again in the same processes it gives other results"
    if there is None:
        told = f"on {ranks}: {verdict.status} {verdict.reason}".rstrip()
        return "no", told + (_SHARED if verdict.status == "holds" else "")
    if there.kind == "value" and there.got != finding.got:
        return "yes", f"the law breaks on {ranks} too, with other numbers: got {there.got}"
    return "yes", "" if there.kind == finding.kind else f"on {ranks} it fails as: {there.kind}"


def _ranks(kind: str, case: Case) -> str:
    """Ranks as a finding names those that broke its law too: "gloo x4"."""
    return f"{metal.of(kind).words} x{case.world_size}"


def _together(tried: list[Confirmed]) -> Confirmed:
    """What is said of a finding that was run again on several kinds of ranks: one that breaks the law too is enough."""
    said: Confirmation = next(
        (word for word in ("yes", "no") if any(one.confirmed == word for one in tried)),
        "not tried",
    )
    notes = "; ".join(one.note for one in tried if one.note)
    return Confirmed(said, notes, tuple(name for one in tried for name in one.on))
