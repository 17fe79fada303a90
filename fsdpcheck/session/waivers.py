"""Waivers: findings that a repository lives with for a time, each with a witness that is replayed every time."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdpcheck.errors import UsageError, explain, reading
from fsdpcheck.findings import tokens
from fsdpcheck.findings.roots import same, words
from fsdpcheck.findings.verdict import Finding, Verdict


@dataclass(frozen=True)
class Waiver:
    """``law``: a glob over the laws that the defect may break. ``token``: of a case that shows it, the witness.

    ``expires``: the last day on which it counts. ``reason``, ``owner``: why, and who will see to it. ``root``: how the
    witness fails (findings/roots.py), without which it would stand for any other mistake that the same case shows.
    """

    law: str
    adapter: str
    reason: str
    owner: str
    expires: date
    token: str
    root: str = ""

    def covers(self, finding: Finding, witness: Finding) -> bool:
        """Whether ``finding`` is of the defect that ``witness`` was found to be when the token was replayed.

        The witness itself is, also where no cause is named of it: of cases that fail by another defect, none may fit.
        """
        mine = self.is_about(finding) and witness.adapter == self.adapter
        alike = (finding.token, finding.kind, finding.what) == (self.token, witness.kind, witness.what)
        itself = alike and not (finding.cause and witness.cause)
        return mine and (itself or same(finding, witness))

    def is_about(self, finding: Finding) -> bool:
        """Whether ``finding`` is of its adapter and of one of its laws, whatever the defect."""
        return finding.adapter == self.adapter and fnmatchcase(finding.law, self.law)

    def __str__(self) -> str:
        return f"{self.law} on {self.adapter}, until {self.expires}: {self.reason} ({self.owner})"


Replay = Callable[[Waiver], Verdict]


@dataclass(frozen=True)
class Waived:
    """What waivers say of one session.

    ``wrong``: waivers that are red by themselves, a sentence each. ``findings``: those that one covers. ``unmet``:
    waivers whose witness fails still, of laws that hold in the cases of this session.
    """

    wrong: tuple[str, ...]
    findings: tuple[tuple[Finding, Waiver], ...]
    unmet: tuple[Waiver, ...] = ()


def read(file: Path) -> tuple[Waiver, ...]:
    """Those of ``file``, a pyproject.toml: [[tool.fsdpcheck.waiver]]. Raises UsageError for a wrong one."""
    if not file.exists():
        return ()
    table: Any = tomllib.loads(reading.text(file))
    for name in ("tool", "fsdpcheck"):
        table = table.get(name, {})
    return tuple(_waiver(entry, f"{file}, waiver {number}") for number, entry in enumerate(table.get("waiver", ()), 1))


def applied(waivers: Iterable[Waiver], findings: Iterable[Finding], replay: Replay, today: date) -> Waived:
    """Replay the witness of each waiver, and tell which findings are of its defect."""
    known, covered, wrong, unmet = [*findings], list[tuple[Finding, Waiver]](), list[str](), list[Waiver]()
    for waiver in waivers:
        if waiver.expires < today:
            wrong.append(f"a waiver has expired: {waiver}")
            continue
        verdict = replay(waiver)
        if verdict.finding is None:
            became = "holds now: take the waiver away" if verdict.status == "holds" else f"is {verdict.status} now"
            wrong.append(f"the witness of a waiver {became}: {waiver}")
            continue
        if waiver.root != (root := words(verdict.finding)):
            became = "fails otherwise now" if waiver.root else "is not said to fail in any way"
            wrong.append(
                f"the witness of a waiver {became}: {waiver}; if that is the defect, write root = {_toml(root)}"
            )
            continue
        mine = [finding for finding in known if waiver.covers(finding, verdict.finding)]
        if not mine and any(waiver.is_about(finding) for finding in known):
            wrong.append(f"a waiver covers no finding of this session: {waiver}")
        elif not mine:
            unmet.append(waiver)
        covered += [(finding, waiver) for finding in mine]
    return Waived(tuple(wrong), tuple(covered), tuple(unmet))


def _toml(text: str) -> str:
    """A string of TOML."""
    return json.dumps(text, ensure_ascii=False)


def _waiver(entry: Any, where: str) -> Waiver:
    wanted = {field.name: date if field.name == "expires" else str for field in dataclasses.fields(Waiver)}
    got = {name: type(value) for name, value in entry.items()} if isinstance(entry, dict) else {}
    if {"root": str, **got} != wanted:
        lacks, strange = sorted(wanted.keys() - got.keys() - {"root"}), sorted(got.keys() - wanted.keys())
        told = [f"no {name}" for name in lacks] + [f"unknown: {name}" for name in strange]
        told += [f"{name} is {got[name].__name__}" for name in wanted if name in got and got[name] is not wanted[name]]
        kinds = "strings law, adapter, reason, owner and token; expires = 2027-01-31, a date"
        raise UsageError(explain("a waiver is not complete", got=", ".join(told), wanted=kinds, where=where))
    waiver = Waiver(**entry)
    try:
        token = tokens.decode(waiver.token)
    except UsageError as error:
        raise UsageError(
            explain("a waiver has no token", got=error, wanted="that of its finding", where=where)
        ) from error
    if token.adapter != waiver.adapter or not fnmatchcase(token.law, waiver.law):
        got_of = f"a token of {token.law} on {token.adapter}"
        raise UsageError(
            explain("a waiver has the token of another finding", got=got_of, wanted=str(waiver), where=where)
        )
    return waiver
