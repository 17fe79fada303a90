"""A judge that is asked law by law: a process that judges for one that may have imported what is judged.

Who asks, such as a test, chooses the order and may ask for nothing at all. Judged is as in a session, confirmations
among it. This process imports neither torch nor hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdpcheck.errors import INTERNAL, NO_PROGRESS, USAGE, FsdpcheckError, UsageError
from fsdpcheck.findings.verdict import NOT_CHECKED, Verdict
from fsdpcheck.session.child_process import Child, Crew, Event, Stopped
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan


class Judge:
    """Judges laws of ``plan`` on its adapters as it is asked, in one process that it starts when it has to.

    ``ledger``: what it has judged. ``unpromised``: by adapter, the laws that it does not promise, each with its reason.
    ``spaces``: by law what names its space of cases; laws of one space that are asked in a row share executions.
    """

    def __init__(self, plan: Plan) -> None:
        self.ledger = Ledger(plan)
        self.unpromised: Mapping[str, Mapping[str, str]] = {}
        self.spaces: Mapping[str, str] = {}
        self._crew: Crew | None = None
        self._child: Child | None = None
        self._told: Iterator[tuple[Child, Event | str]] = iter(())
        self._stuck: dict[str, str] = {}
        """Adapters whose ranks never came back -> the law: each further one would take as long."""

    def begin(self) -> None:
        """Start the process, and have what there is to judge told. Raises UsageError for a plan that cannot begin."""
        if self._child is not None:
            return
        self._crew = Crew(adopts=False)
        try:
            with self._crew.hearing():
                child = self._crew.start("main", [self.ledger.plan.to_json()])
                self._told = self._crew.told()
                plan = next(event for event in self._events() if event["event"] in ("plan", "error"))
        except _Ended as end:
            self.rest()
            raise UsageError(f"the checking process died before it judged anything: {end.death}") from None
        if plan["event"] == "error":
            self.rest()
            raise (UsageError if plan["exit_code"] == USAGE else FsdpcheckError)(plan["text"])
        self.ledger.take(plan)
        self.unpromised, self.spaces = plan["unpromised"], plan["spaces"]
        self._child, child.idle = child, True

    def ask(self, law: str, adapter: str) -> Verdict:
        """The verdict of ``law`` on ``adapter``, its findings confirmed where they can be. Raises UsageError."""
        if adapter in self._stuck:
            reason = f"{NOT_CHECKED}: its ranks made no progress in {self._stuck[adapter]}"
            return self._found(Verdict(law, adapter, "error", reason=reason, exit_code=NO_PROGRESS))
        self.begin()
        child, crew = self._child, self._crew
        assert child is not None
        assert crew is not None
        self.ledger.verdicts.pop((law, adapter), None)
        with crew.hearing():
            child.give((law, adapter))
            verdict = self._judged(law, adapter)
        child.idle = True
        if verdict.status == "error" and verdict.exit_code == NO_PROGRESS:
            self._stuck[adapter] = law
        return verdict

    def rest(self) -> None:
        """End the process; the next question starts another."""
        if self._crew is not None:
            self._crew.close()
        self._crew = self._child = None

    def _judged(self, law: str, adapter: str) -> Verdict:
        """Hear what is told until the verdict is whole, or the process is no more."""
        left = -1
        try:
            for event in self._events():
                self.ledger.take(event)
                if event["event"] == "error":
                    self.rest()
                    told = Verdict(law, adapter, "error", reason=event["text"], exit_code=event["exit_code"])
                    return self._found(told)
                if event["event"] == "verdict":
                    left = len(self.ledger.verdicts[law, adapter].findings)
                left -= event["event"] == "confirmation"
                if left == 0:
                    return self.ledger.verdicts[law, adapter]
        except _Ended as end:
            self.rest()
            return self._lost(law, adapter, end.death)
        raise AssertionError("the events of a process end with its death")

    def _lost(self, law: str, adapter: str, death: str) -> Verdict:
        if (known := self.ledger.verdicts.get((law, adapter))) is not None and known.findings:
            return known  # it died while it ran a finding again on real ranks
        verdict = self.ledger.stop(death) if isinstance(death, Stopped) else self.ledger.lose(death)
        reason = f"the checking process died outside any case: {death}"
        return verdict or self._found(Verdict(law, adapter, "error", reason=reason, exit_code=INTERNAL))

    def _found(self, verdict: Verdict) -> Verdict:
        self.ledger.take({"event": "verdict", **verdict.to_data()})
        return verdict

    def _events(self) -> Iterator[Event]:
        """What the process tells. Raises KeyboardInterrupt, and _Ended when it dies."""
        for _, told in self._told:
            if self._crew is None or self._crew.interrupted:
                self.rest()
                raise KeyboardInterrupt
            if isinstance(told, str):
                raise _Ended(told)
            yield told


class _Ended(Exception):
    """The process is no more."""

    def __init__(self, death: str) -> None:
        super().__init__(death)
        self.death = death
