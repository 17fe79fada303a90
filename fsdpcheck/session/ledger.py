"""Ledger: what a session has told so far, kept by the process that survives it, without torch or hypothesis."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fsdpcheck.case import from_json
from fsdpcheck.errors import FINDING, INTERNAL, NO_PROGRESS, USAGE
from fsdpcheck.findings.tokens import Token, command, encode
from fsdpcheck.findings.verdict import Finding, Verdict, exit_code
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.sharding import elsewhere

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


_NOTHING_PROMISED = """nothing was checked: none of the chosen laws is promised by a chosen adapter
  next    choose other laws with --law, or add the promise to the adapter's Features"""


@dataclass
class Running:
    """What a worker is at: ``case`` is the JSON of the case its ranks run, the ``number``-th of the law; "" is none."""

    law: str
    adapter: str
    case: str = ""
    number: int = 0


@dataclass(frozen=True)
class Origin:
    """``at``: when the session began that gave a verdict, ISO 8601. ``key``: of the sources it was judged with."""

    at: str
    key: str


@dataclass
class Ledger:
    """The events of one session (see session/run.py), taken one by one; a finding is kept the moment it is told.

    ``unaccepted``: adapter -> the traits it does not accept. ``running``: worker -> what it is at. ``errors`` are
    what ended the session early, ``unmatched`` the glob that no law matches, if it was that. ``verdicts`` are in the
    order of the plan once the session has ended, whoever was done first. ``began``: time, ISO 8601; ``folder``: where
    the session runs. ``sources``: key -> provenance.Sources as data, that ``origins`` name.
    ``elsewhere``: (law, adapter) of the plan that other shards judge. ``waived``: token of a finding -> the waiver that
    covers it, in words; it counts for nothing.
    """

    plan: Plan
    laws: tuple[str, ...] = ()
    began: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    guarantees: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unaccepted: dict[str, list[str]] = field(default_factory=dict)
    elsewhere: frozenset[tuple[str, str]] = frozenset()
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    sources: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: dict[tuple[str, str], Origin] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    errors: list[tuple[str, int]] = field(default_factory=list)
    unmatched: str = ""
    waived: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    interrupted: bool = False
    folder: str = ""

    def take(self, event: Mapping[str, Any], worker: int = 0) -> None:
        """Take in one event that ``worker`` told."""
        kind = event["event"]
        if kind == "plan":
            self.laws, self.guarantees = tuple(event["laws"]), dict(event["guarantees"])
            self.versions, self.began = dict(event["versions"]), event.get("at", "")
            self.folder = event.get("folder", "")
            self.notes = tuple(event.get("notes", ()))
            self.unaccepted = dict(event["unaccepted"])
            self.plan = replace(self.plan, installs=tuple(event["installs"]))
            self.elsewhere = elsewhere(self.plan, self.laws, event.get("spaces", {}))
        elif kind == "law":
            self.running[worker] = Running(event["law"], event["adapter"])
        elif kind == "case":
            running = self.running[worker]
            self.running[worker] = replace(running, case=event["case"], number=running.number + 1)
        elif kind == "sources":
            self.sources |= {event["key"]: event["sources"]} if event["sources"] else {}
            self.origins[event["law"], event["adapter"]] = Origin(event.get("at", self.began), event["key"])
        elif kind == "note":
            self.notes = (*self.notes, event["text"])
        elif kind == "verdict":
            self._judge(Verdict.from_data({name: event[name] for name in event if name != "event"}))
        elif kind == "confirmation":
            self._confirm(event)
        elif kind == "error":
            self.errors.append((event["text"], event["exit_code"]))
            self.unmatched = event.get("glob", self.unmatched)
        elif kind == "end":
            self.ended, self.interrupted = True, event["interrupted"]
            self.verdicts = {pair: self.verdicts[pair] for pair in self._pairs() if pair in self.verdicts}
            judged = [verdict.status for verdict in self.verdicts.values()]
            whole = not self.elsewhere and not self.errors and not self.interrupted
            if judged and whole and set(judged) <= {"not promised", "not asked"}:
                self.errors.append((_NOTHING_PROMISED, USAGE))

    @property
    def moment(self) -> float:
        """When the session began, in seconds, to put sessions in order; 0 where nobody knows."""
        return datetime.fromisoformat(self.began).timestamp() if self.began else 0.0

    @property
    def total(self) -> int:
        """How many verdicts a complete session has."""
        return len(self.laws) * len(self.plan.adapters) - len(self.elsewhere)

    @property
    def findings(self) -> list[Finding]:
        return [finding for verdict in self.verdicts.values() for finding in verdict.findings]

    @property
    def exit_code(self) -> int:
        """The code of the session so far; 130 after an interrupt, whatever was found."""
        if self.interrupted:
            return INTERRUPTED
        counted = [one for one in self.verdicts.values() if not one.findings or self._is_red(one)]
        codes = [verdict.exit_code for verdict in counted] + [code for _, code in self.errors]
        missing = self.ended and len(self.verdicts) < self.total
        return exit_code([*codes, *([INTERNAL] if missing else [])])

    def lose(self, how: str, worker: int = 0) -> Verdict | None:
        """The process of ``worker`` died ``how``: that is the verdict of what it was at. None when it ran no case."""
        at = self.running.pop(worker, None)
        if at is None or not at.case:
            return None
        token = Token(at.law, at.adapter, from_json(at.case), self.plan.installs, engine=self.plan.engine)
        number = f", number {at.number} of the law; it was not made smaller"
        verdict = lost(token, self.plan.engine, how, self.guarantees.get(at.law, ""), number)
        verdict = replace(verdict, cases=at.number)
        self._judge(verdict)
        return verdict

    def stop(self, why: str, worker: int = 0) -> Verdict | None:
        """The process of ``worker`` was ended because it never came back. None when it was at no law."""
        at = self.running.pop(worker, None)
        if at is None:
            return None
        reason = why
        if at.case:
            case = from_json(at.case)
            token = encode(Token(at.law, at.adapter, case, self.plan.installs, engine=self.plan.engine))
            again = command(token, at.adapter, self.plan.installs, self.plan.laws_from)
            reason += f"\nin case {case.describe()}\nreplay with: {again}"
        verdict = Verdict(at.law, at.adapter, "error", at.number, reason=reason, exit_code=NO_PROGRESS)
        self._judge(verdict)
        return verdict

    def _is_red(self, verdict: Verdict) -> bool:
        return verdict.exit_code != FINDING or any(one.token not in self.waived for one in verdict.findings)

    def _judge(self, verdict: Verdict) -> None:
        pair = (verdict.law, verdict.adapter)
        self.verdicts[pair] = verdict
        self.running = {worker: at for worker, at in self.running.items() if (at.law, at.adapter) != pair}

    def _pairs(self) -> Iterator[tuple[str, str]]:
        pairs = ((law, adapter) for adapter, law in itertools.product(self.plan.adapters, self.laws))
        return (pair for pair in pairs if pair not in self.elsewhere)

    def _confirm(self, event: Mapping[str, Any]) -> None:
        key = (event["law"], event["adapter"])
        verdict = self.verdicts[key]
        told = {name: event[name] for name in ("confirmed", "note")} | {"confirmed_on": tuple(event["confirmed_on"])}
        finding, *behind = (replace(one, **told) if one.token == event["token"] else one for one in verdict.findings)
        self.verdicts[key] = replace(verdict, finding=finding, behind=tuple(behind))


def lost(token: Token, engine: str, how: str, guarantee: str = "", number: str = "") -> Verdict:
    """The finding that the process running ``token``'s case died ``how``."""
    finding = Finding(
        law=token.law,
        guarantee=guarantee,
        adapter=token.adapter,
        engine=engine,
        kind="lost",
        place="",
        what="the process that ran the ranks died",
        got=how,
        wanted="a step that returns or raises",
        where=f"while ranks ran this case{number}",
        cause="",
        case=json.loads(token.case.to_json()),
        words=token.case.describe(),
        token=encode(token),
        note="a case that ends its process is not run again on gloo by itself: replay it with --engine processes",
    )
    return Verdict(token.law, token.adapter, "finding", 1, finding=finding, exit_code=FINDING)
