"""What an earlier session of the same plan has found out, read from its document and, if it was killed, its journal.

A verdict is taken over where everything that it depends on is as it was: the plan, the versions, and its sources (see
loading/provenance.py). Checksums tell what was edited by hand; they are no signature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.errors import UsageError, reading
from fsdpcheck.errors.excerpt import excerpt, visible
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.findings import faults
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.loading.provenance import Sources
from fsdpcheck.session.journal import digest_of_document, digest_of_line, digest_of_verdict, journal_of
from fsdpcheck.session.ledger import Ledger, Origin
from fsdpcheck.session.plan import Plan

_ANEW: Final = "next: leave --resume out, and it begins anew"
_EDITED: Final = "was edited: its checksum is of other content"
_KEYLESS: Final = "it does not say with which files its verdicts were found out, as older releases did not"
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError, RecursionError)

Pair = tuple[str, str]


@dataclass(frozen=True)
class Known:
    """A verdict that was found out ``at`` (ISO 8601), with ``sources``."""

    verdict: Verdict
    at: str
    sources: Sources

    @property
    def pair(self) -> Pair:
        return self.verdict.law, self.verdict.adapter

    def events(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """As a session tells it, who judged when before what."""
        origin = {"law": self.verdict.law, "adapter": self.verdict.adapter, "at": self.at, "key": self.sources.key}
        told = {"event": "sources", **origin, "sources": self.sources.to_data()}
        return told, {"event": "verdict", **self.verdict.to_data()}


@dataclass(frozen=True)
class Earlier:
    """``known``: verdicts that stand if nothing changed; ``versions``: file -> of what they are that stood in it."""

    versions: Mapping[Path, Mapping[str, str]]
    known: tuple[Known, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(one.verdict for one in self.known)

    def require_versions(self, now: Mapping[str, str]) -> None:
        """Raise UsageError where another torch, hypothesis, numpy or Python gave the verdicts."""
        for file, then in self.versions.items():
            others = [f"{name} {then.get(name)}, now {now[name]}" for name in now if now[name] != then.get(name)]
            if others:
                raise UsageError(f"--resume: the verdicts in {file} are of {'; '.join(others)}; {_ANEW}")

    def taken_over(self, now: Sources, pairs: Iterable[Pair]) -> tuple[list[Known], str]:
        """(what stands of ``pairs`` for a session that has loaded ``now``, that in words)."""
        wanted = frozenset(pairs)
        changes = {one.sources.key: one.sources for one in self.known}
        changed = {key: sources.changed(now) for key, sources in changes.items()}
        asked = [one for one in self.known if one.pair in wanted]
        stand = [one for one in asked if not changed[one.sources.key]]
        fallen = [changed[one.sources.key] for one in asked if changed[one.sources.key]]
        return stand, _told(stand, fallen, len(wanted) - len(asked))


def _told(stand: list[Known], fallen: list[str], left: int) -> str:
    """ "31 verdicts taken over from 2026-11-22 12:46, 4 judged anew: train_adapter.py changed"."""
    times = Counter(one.at[:16].replace("T", " ") for one in stand)
    each = [f"{count} verdict{'s' * (count > 1)} taken over from {time}" for time, count in times.items()]
    parts = each or ["no verdict taken over"]
    parts += [f"{left} found out now"] if left else []
    parts += [f"{len(fallen)} judged anew: {'; '.join(dict.fromkeys(fallen))}"] if fallen else []
    return ", ".join(parts)


@dataclass(frozen=True)
class _Told:
    release: str
    plan: Plan
    versions: Mapping[str, str]
    known: Mapping[Pair, Known]


def earlier(file: Path, plan: Plan) -> Earlier:
    """What ``--json file`` holds of ``plan``, nothing where there is no such file. Adapters count as the same.

    Kept are findings, laws not promised, and those that hold without a reservation; all others are tried again. Raises
    UsageError for a file that cannot be read, was edited, says not what its verdicts depend on, or is of another plan
    or release.
    """
    versions: dict[Path, Mapping[str, str]] = {}
    known: dict[Pair, Known] = {}
    for path, read in ((file, _of_document), (journal_of(file), _of_journal)):
        if path.exists():
            told = _read(path, read)
            _require_same(path, told, _in_full(plan))
            found = {pair: one for pair, one in told.known.items() if _stands(one.verdict)}
            versions |= {path: told.versions} if found else {}
            known |= found
    return Earlier(versions, tuple(known.values()))


def _stands(verdict: Verdict) -> bool:
    held = verdict.status == "holds" and not verdict.reason and verdict.cases > 0
    return held or verdict.status in ("finding", "not promised")


def _read(path: Path, read: Callable[[str], _Told]) -> _Told:
    try:
        return read(reading.text(path))
    except _MALFORMED as error:
        why = _short(error) if isinstance(error, Unreadable | UsageError) else f"{type(error).__name__} in its content"
        raise UsageError(f"--resume: {path} cannot be read as a session: {why}; {_ANEW}") from error


def _require_same(path: Path, told: _Told, asked: Plan) -> None:
    if told.release != __version__:
        release = _short(told.release)
        raise UsageError(f"--resume: {path} is of fsdpcheck {release}, this is {__version__}; {_ANEW}")
    if told.plan != asked:
        other = next(name for name in vars(asked) if getattr(asked, name) != getattr(told.plan, name))
        got, wanted = (_short(repr(getattr(plan, other))) for plan in (told.plan, asked))
        raise UsageError(f"--resume: {path} is of another plan: its {other}: {got}, asked: {wanted}; {_ANEW}")


def _short(text: object) -> str:
    return " ".join(visible(excerpt(str(text), 200)).split())


def _of_document(text: str) -> _Told:
    data: dict[str, Any] = reading.typed(dict[str, Any], reading.json_data(text), "the report")
    if "origins" not in data:
        raise Unreadable(_KEYLESS)
    if data["digest"] != digest_of_document(data):
        raise Unreadable(f"what all verdicts share (plan, versions, sources) {_EDITED}")
    sources = {key: reading.typed(Sources, one, f"sources.{key}") for key, one in data["sources"].items()}
    origins = {(one["law"], one["adapter"]): one for one in data["origins"]}
    known = {}
    for told in data["verdicts"]:
        verdict, origin = _verdict(told), origins.get((told["law"], told["adapter"]))
        if origin is not None:
            if origin["digest"] != digest_of_verdict(told, origin["at"], origin["sources"]):
                raise Unreadable(f"the verdict of {verdict.law} on {verdict.adapter} {_EDITED}")
            known[verdict.law, verdict.adapter] = _known(verdict, Origin(origin["at"], origin["sources"]), sources)
    return _Told(data["fsdpcheck"], _plan(data["plan"]), _versions(data["versions"]), known)


def _of_journal(text: str) -> _Told:
    """Lines may be cut short, where a writer was killed: what they told is found out again."""
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        with suppress(Unreadable):
            lines.append(reading.typed(dict[str, Any], reading.json_data(line), "a line"))
    if not lines:
        raise Unreadable("no line of it is whole")
    first, *events = [_unedited(line, number) for number, line in enumerate(lines, 1)]
    ledger = Ledger(_plan(first["plan"]))
    for event in events:
        if event["event"] != "began":
            ledger.take(event)
    sources = {key: reading.typed(Sources, one, f"sources.{key}") for key, one in ledger.sources.items()}
    found = {pair: verdict for pair, verdict in ledger.verdicts.items() if pair in ledger.origins}
    known = {
        pair: _known(_verdict(verdict.to_data()), ledger.origins[pair], sources) for pair, verdict in found.items()
    }
    return _Told(first["fsdpcheck"], _plan(first["plan"]), _versions(ledger.versions), known)


def _unedited(line: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The line without its checksum."""
    if "digest" not in line:
        raise Unreadable(_KEYLESS)
    if line["digest"] != digest_of_line(line):
        about = f"the {line['event']} of {line['law']} on {line['adapter']}" if "law" in line else f"line {number}"
        raise Unreadable(f"{about} {_EDITED}")
    return {name: value for name, value in line.items() if name != "digest"}


def _known(verdict: Verdict, origin: Origin, sources: Mapping[str, Sources]) -> Known:
    datetime.fromisoformat(origin.at)
    return Known(verdict, origin.at, sources[origin.key])


def _verdict(data: Any) -> Verdict:
    verdict: Verdict = reading.typed(Verdict, data, "a verdict")
    return verdict


def _versions(data: Any) -> Mapping[str, str]:
    versions: Mapping[str, str] = reading.typed(Mapping[str, str], data, "versions")
    return versions


def _plan(data: Any) -> Plan:
    plan: Plan = reading.typed(Plan, data, "plan")
    return _in_full(plan)


def _in_full(plan: Plan) -> Plan:
    """Installs in full: a journal begins before they are looked up."""
    return replace(plan, installs=tuple(map(faults.resolved, plan.installs)))
