"""Supervision: the session runs in children, so a crash of simulated ranks is a finding and not the end of the run.

This process imports neither torch nor hypothesis. It deals out what is to be checked and reads the children's events;
when one dies it says which case was running, keeps every finding, and starts a new child for what is left.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fsdpcheck.errors import INTERNAL, NO_PROGRESS, USAGE, FsdpcheckError, NoProgress, UsageError
from fsdpcheck.findings.tokens import decode
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.loading.provenance import Sources
from fsdpcheck.session.child_process import Child, Crew, Stopped
from fsdpcheck.session.ledger import Ledger, lost
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.resume import Earlier
from fsdpcheck.session.work_queue import Agenda, Pair

_WORTH_A_PROCESS: Final = 8  # checks: a process needs seconds to import torch, a check about one in the quick profile

Listen = Callable[[Ledger, Mapping[str, Any]], None]


def supervise(plan: Plan, listen: Listen, jobs: int = 1, known: Earlier | None = None) -> Ledger:
    """Run ``plan`` in children until it is done; ``listen(ledger, event)`` hears every event after the ledger.

    At most ``jobs`` children at a time: one at first, more once it is known that there is work for them. Verdicts do
    not depend on how many there are; they come in the order they are done, and the ledger has them in the plan's.
    Verdicts that an earlier session has ``known`` come first and are not found out again. Raises UsageError for those
    of another torch, hypothesis or Python.
    """
    ledger = Ledger(plan)
    with Crew.forwarding_interrupts() as crew:
        session = _Supervised(crew, ledger, listen, jobs, known)
        session.start()
        for child, told in crew.told():
            if isinstance(told, str):
                session.bury(child, told)
            else:
                session.hear(child, told)
        session.tell({"event": "end", "interrupted": crew.interrupted or session.interrupted})
    return ledger


def replayed(token: str, engine: str, budget: float | None, laws: tuple[str, ...] = ()) -> Verdict:
    """The verdict on a trusted token's one case, run in a child: a crash of its ranks is a finding.

    Raises UsageError, or FsdpcheckError for what went wrong in the child.
    """
    verdict, death = None, ""
    with Crew.forwarding_interrupts() as crew:
        crew.start("replay", [token, engine, json.dumps(budget), json.dumps(laws)])
        for _, told in crew.told():
            if isinstance(told, str):
                death = told
            elif told["event"] == "error":
                raise (UsageError if told["exit_code"] == USAGE else FsdpcheckError)(told["text"])
            else:
                verdict = _verdict(told)
    if crew.interrupted:
        raise KeyboardInterrupt
    if isinstance(death, Stopped):
        raise NoProgress(death)
    return verdict or lost(decode(token), engine, death)


class _Supervised:
    """One session: what its children tell becomes the ledger's, what is left goes to whoever is free."""

    def __init__(self, crew: Crew, ledger: Ledger, listen: Listen, jobs: int, known: Earlier | None) -> None:
        self._crew, self._ledger, self._listen, self._jobs, self._known = crew, ledger, listen, jobs, known
        self._agenda: Agenda | None = None
        self._waiting: list[Child] = []
        """Children without work until a verdict comes."""
        self._last: dict[int, Pair] = {}
        """What each child was given last."""
        self.interrupted = False

    def start(self) -> None:
        """Start a child; it gets its first pair when it has told its plan."""
        self._crew.start("main", [self._ledger.plan.to_json()])

    def tell(self, event: Mapping[str, Any], worker: int = 0) -> None:
        """Into the ledger, then to the listener."""
        self._ledger.take(event, worker)
        self._listen(self._ledger, event)

    def hear(self, child: Child, event: Mapping[str, Any]) -> None:
        """Take one event of a child."""
        kind = event["event"]
        if kind == "plan":
            self._begin(event)
            self._give(child)
        elif kind == "end":
            child.ended = True
            self.interrupted = self.interrupted or event["interrupted"]
        else:
            self.tell(event, child.number)
            if kind == "verdict":
                self._leave_out(_verdict(event))
                self._give(child)
            elif kind == "error" and self._agenda is not None:
                self._agenda.give_up()  # what the others are at is still told
                self._wake()

    def bury(self, child: Child, death: str) -> None:
        """A child's pipe has ended: was it done, and if not, what was it at?"""
        if child.ended or self._crew.interrupted:
            return
        stopped = isinstance(death, Stopped)
        verdict = self._ledger.stop(death, child.number) if stopped else self._ledger.lose(death, child.number)
        if verdict is None:
            self.tell({"event": "error", **self._outside_any_case(death)})
            if self._agenda is not None:
                self._agenda.give_up()
                self._wake()
            return
        self._listen(self._ledger, {"event": "verdict", **verdict.to_data()})
        self._leave_out(verdict)
        if self._agenda:
            self.start()

    def _outside_any_case(self, death: str) -> dict[str, Any]:
        """What is said of a death that no case explains: before the plan is told, what is the user's is imported."""
        if isinstance(death, Stopped):
            return {"text": str(death), "exit_code": NO_PROGRESS}
        plan = self._ledger.plan
        theirs = [ref for ref in (*plan.laws_from, *plan.own) if ref]
        if self._agenda is None and theirs:
            text = f"the checking process died while it imported {', '.join(theirs)}: {death}"
            return {"text": text, "exit_code": USAGE}
        return {"text": f"the checking process died outside any case: {death}", "exit_code": INTERNAL}

    def _begin(self, plan: Mapping[str, Any]) -> None:
        """The first plan told says what there is to do; all children tell the same."""
        if self._agenda is not None:
            return
        self.tell(plan)
        pairs = [(law, ref) for ref, law in itertools.product(self._ledger.plan.adapters, plan["laws"])]
        pairs = [pair for pair in pairs if pair not in self._ledger.elsewhere]
        known = self._taken_over(plan, pairs)
        self._agenda = Agenda((pair for pair in pairs if pair not in known), plan["needing"], plan["spaces"])
        for _ in range(1, min(self._jobs, len(self._agenda), -(-plan["promised"] // _WORTH_A_PROCESS))):
            if not self._crew.interrupted:
                self.start()

    def _taken_over(self, plan: Mapping[str, Any], pairs: Sequence[Pair]) -> set[Pair]:
        """Tell what is known already and stands. Raises UsageError where it is of other versions."""
        if self._known is None or not self._known.known:
            return set()
        self._known.require_versions(plan["versions"])
        stand, words = self._known.taken_over(Sources(**plan["sources"]), pairs)
        self.tell({"event": "note", "text": words})
        for event in (event for known in stand for event in known.events()):
            self.tell(event)
        return {known.pair for known in stand}

    def _leave_out(self, verdict: Verdict) -> None:
        assert self._agenda is not None
        for vain in self._agenda.hear(verdict):
            self.tell({"event": "verdict", **vain.to_data()})
        self._wake()

    def _wake(self) -> None:
        """Those who waited for a verdict of others go on."""
        waiting, self._waiting = self._waiting, []
        for child in waiting:
            self._give(child)

    def _give(self, child: Child) -> None:
        assert self._agenda is not None
        pair = self._agenda.take(self._last.get(child.number))
        if pair is not None:
            self._last[child.number] = pair
            child.give(pair)
        elif self._agenda:
            child.idle = True
            self._waiting.append(child)
        else:
            child.dismiss()


def _verdict(event: Mapping[str, Any]) -> Verdict:
    return Verdict.from_data({name: event[name] for name in event if name != "event"})
