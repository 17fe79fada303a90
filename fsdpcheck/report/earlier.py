"""What an earlier session of the same plan has found out, read from its document and, if it was killed, its journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fsdpcheck import __version__, planted
from fsdpcheck.errors import UsageError
from fsdpcheck.ledger import Ledger
from fsdpcheck.plan import Plan
from fsdpcheck.report.document import journal_of
from fsdpcheck.verdict import Verdict

_ANEW: Final = "next: leave --resume out, and it begins anew"


@dataclass(frozen=True)
class Earlier:
    """``verdicts`` that need not be found out again; ``versions``: file -> of what they are that stood in it."""

    versions: Mapping[Path, Mapping[str, str]]
    verdicts: tuple[Verdict, ...]

    def require_versions(self, now: Mapping[str, str]) -> None:
        """Raise UsageError where another torch, hypothesis or Python gave the verdicts."""
        for file, then in self.versions.items():
            others = [f"{name} {then.get(name)}, now {now[name]}" for name in now if now[name] != then.get(name)]
            if others:
                raise UsageError(f"--resume: the verdicts in {file} are of {'; '.join(others)}; {_ANEW}")


@dataclass(frozen=True)
class _Told:
    release: str
    plan: Plan
    versions: Mapping[str, str]
    verdicts: Mapping[tuple[str, str], Verdict]


def earlier(file: Path, plan: Plan) -> Earlier:
    """What ``--json file`` holds of ``plan``, nothing where there is no such file. Adapters count as the same.

    Kept are findings, laws not promised, and those that hold without a reservation; all others are tried again. Raises
    UsageError for a file that cannot be read, or is of another plan or release.
    """
    versions: dict[Path, Mapping[str, str]] = {}
    verdicts: dict[tuple[str, str], Verdict] = {}
    for path, read in ((file, _of_document), (journal_of(file), _of_journal)):
        if path.exists():
            told = _read(path, read)
            _require_same(path, told, replace(plan, installs=tuple(map(planted.resolved, plan.installs))))
            found = {pair: verdict for pair, verdict in told.verdicts.items() if _stands(verdict)}
            versions |= {path: told.versions} if found else {}
            verdicts |= found
    return Earlier(versions, tuple(verdicts.values()))


def _stands(verdict: Verdict) -> bool:
    return verdict.status in ("finding", "not promised") or (verdict.status == "holds" and not verdict.reason)


def _read(path: Path, read: Callable[[str], _Told]) -> _Told:
    try:
        return read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"--resume: {path} cannot be read as a session ({error!r}); {_ANEW}") from error


def _require_same(path: Path, told: _Told, asked: Plan) -> None:
    if told.release != __version__:
        raise UsageError(f"--resume: {path} is of fsdpcheck {told.release}, this is {__version__}; {_ANEW}")
    if told.plan != asked:
        other = next(name for name in vars(asked) if getattr(asked, name) != getattr(told.plan, name))
        got, wanted = getattr(told.plan, other), getattr(asked, other)
        raise UsageError(f"--resume: {path} is of another plan: its {other}: {got!r}, asked: {wanted!r}; {_ANEW}")


def _of_document(text: str) -> _Told:
    data: dict[str, Any] = json.loads(text)
    verdicts = [Verdict.from_data(each) for each in data["verdicts"]]
    by_pair = {(verdict.law, verdict.adapter): verdict for verdict in verdicts}
    return _Told(data["fsdpcheck"], _plan(data["plan"]), data["versions"], by_pair)


def _of_journal(text: str) -> _Told:
    """Lines may be cut short, where a writer was killed: what they told is found out again."""
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    first, *events = lines
    ledger = Ledger(_plan(first["plan"]))
    for event in events:
        if event["event"] != "began":
            ledger.take(event)
    return _Told(first["fsdpcheck"], _plan(first["plan"]), ledger.versions, ledger.verdicts)


def _plan(data: Mapping[str, Any]) -> Plan:
    """Installs in full: a journal begins before they are looked up."""
    plan = Plan.from_json(json.dumps(data))
    return replace(plan, installs=tuple(map(planted.resolved, plan.installs)))
