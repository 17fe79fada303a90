"""Kept sessions: the JSON document of a session read back as its ledger, of which every form of report is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from fsdpcheck.errors import UsageError, explain, reading
from fsdpcheck.errors.excerpt import excerpt, visible
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report.document import SCHEMA
from fsdpcheck.session.journal import digest_of_document, digest_of_verdict
from fsdpcheck.session.ledger import Ledger, Origin
from fsdpcheck.session.plan import Plan

_Found = TypeVar("_Found")

_THEN: Final = "name what fsdpcheck run --json has written, as it was written"
_MOST: Final = 400
"""Characters that are told of what is wrong with a file."""


@dataclass(frozen=True)
class _Error:
    text: str
    exit_code: int


@dataclass(frozen=True)
class _Origin:
    law: str
    adapter: str
    at: str
    sources: str
    digest: str


@dataclass(frozen=True)
class Document:
    """The keys of report/document.py; a document with others is none of this release."""

    schema: int
    fsdpcheck: str
    versions: Mapping[str, str]
    plan: Plan
    folder: str
    laws: tuple[str, ...]
    guarantees: Mapping[str, str]
    unaccepted: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    exit_code: int
    ended: bool
    interrupted: bool
    verdicts: tuple[Verdict, ...]
    conditions: Mapping[str, str]
    errors: tuple[_Error, ...]
    waived: Mapping[str, str]
    began: str
    sources: Mapping[str, Mapping[str, Any]]
    origins: tuple[_Origin, ...]
    digest: str


def read(path: Path) -> Ledger:
    """The session that ``path`` holds. Raises UsageError for a file that is no report, of another schema, edited, or
    one of the parts of a session."""
    return _of_file(path, ledger)


def opened(path: Path) -> Document:
    """What ``path`` holds, of a part of a session too. Raises UsageError for a file that is no report, or edited."""
    return _of_file(path, document_of)


def _of_file(path: Path, understood: Callable[[Any], _Found]) -> _Found:
    try:
        return understood(reading.json_data(reading.text(path)))
    except Unreadable as error:
        why = visible(excerpt(str(error), _MOST))
        raise UsageError(explain(f"{path} is no report of a session", got=why, then=_THEN)) from None


def document_of(data: Any) -> Document:
    """The keys of a document that nobody has edited. Raises reading.Unreadable."""
    found = reading.typed(Mapping[str, Any], data, "the report").get("schema")
    if found != SCHEMA:
        raise Unreadable(f"it is of schema {found!r}, this release reads {SCHEMA}")
    read: Document = reading.typed(Document, data, "the report")
    _require_unedited(read, data)
    return read


def ledger(data: Any) -> Ledger:
    """The session of a document; the inverse of document.document. Raises reading.Unreadable."""
    read = document_of(data)
    if read.plan.shard != (1, 1):
        part, parts = read.plan.shard
        raise Unreadable(f"it is part {part} of {parts} of a session; put all parts together first: fsdpcheck merge")
    try:
        datetime.fromisoformat(read.began or "2000-01-01")
    except ValueError:
        raise Unreadable(f"began is {read.began!r}, wanted a time as of ISO 8601") from None
    made = Ledger(
        read.plan,
        read.laws,
        read.began,
        dict(read.versions),
        dict(read.guarantees),
        read.notes,
        {ref: list(names) for ref, names in read.unaccepted.items()},
        verdicts={(verdict.law, verdict.adapter): verdict for verdict in read.verdicts},
        sources={key: dict(sources) for key, sources in read.sources.items()},
        origins={(one.law, one.adapter): Origin(one.at, one.sources) for one in read.origins},
        errors=[(error.text, error.exit_code) for error in read.errors],
        waived=dict(read.waived),
        ended=read.ended,
        interrupted=read.interrupted,
        folder=read.folder,
    )
    if made.exit_code != read.exit_code:
        raise Unreadable(f"its exit code is {read.exit_code}, its verdicts ask for {made.exit_code}: it was edited")
    return made


def _require_unedited(read: Document, data: Mapping[str, Any]) -> None:
    """Checksums tell a slip of a hand, and no forger."""
    if read.digest != digest_of_document(data):
        raise Unreadable("its plan, versions, sources, errors or waivers were edited: its checksum is of other content")
    told = {(one["law"], one["adapter"]): one for one in data["verdicts"]}
    for one in read.origins:
        verdict = told.get((one.law, one.adapter))
        if verdict is None or one.digest != digest_of_verdict(verdict, one.at, one.sources):
            raise Unreadable(f"the verdict of {one.law} on {one.adapter} was edited: its checksum is of other content")


@dataclass(frozen=True)
class Errors:
    """Of one planted error: in how many of its cases a judge found it."""

    found: int
    effective: int


@dataclass(frozen=True)
class Judged:
    """What one judge found in cases of one family. ``smallest``: kind of graded error -> the smallest always found.

    ``honest``, ``alarms``: runs without an error, and how many of them it accused. ``tier``: the standard of equality.
    """

    family: str
    tier: str
    judge: str
    honest: int
    alarms: int
    smallest: Mapping[str, float]
    errors: Mapping[str, Errors]


Power = Mapping[str, tuple[Judged, ...]]
"""Adapter -> what ``fsdpcheck power`` measured."""


def power(path: Path) -> Power:
    """What ``fsdpcheck power --json`` wrote to ``path``. Raises UsageError for any other file."""
    try:
        found: Power = reading.typed(Power, reading.json_data(reading.text(path)), "the measurement")
    except Unreadable as error:
        why = visible(excerpt(str(error), _MOST))
        then = "name what fsdpcheck power --json has written"
        raise UsageError(explain(f"{path} is no measurement of power", got=why, then=then)) from None
    return found
