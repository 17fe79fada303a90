"""The JSON document of a session, and the journal that has every finding before the document exists."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.errors import UsageError
from fsdpcheck.ledger import Ledger, Origin
from fsdpcheck.plan import Plan
from fsdpcheck.provenance import digest
from fsdpcheck.report.conditional import conditions
from fsdpcheck.verdict import Verdict

SCHEMA: Final = 4
"""Version of the document; it grows with every change that a reader could notice."""

_KEPT = ("plan", "sources", "verdict", "confirmation", "error")

_SEALED: Final = ("fsdpcheck", "versions", "plan", "sources")
"""What of a document its own ``digest`` is over; verdicts have theirs."""


def journal_of(file: Path) -> Path:
    """Where the journal of a session lies that will write the document ``file``."""
    return file.with_name(file.name + ".journal")


def document(ledger: Ledger) -> dict[str, Any]:
    """The whole session as JSON data.

    {schema, fsdpcheck, versions, plan, exit_code, interrupted, verdicts, conditions, errors, began, sources, origins,
    digest}. ``conditions``, of laws of which cases were judged: {pattern of their names (fnmatch): what their verdicts
    are conditional on}. ``began``: when, ISO 8601. ``origins``: when each verdict was found out, and with which of the
    ``sources`` {key: provenance.Sources}. A digest is a checksum that tells a slip of a hand; it is no signature.
    """
    judged = (verdict.law for verdict in ledger.verdicts.values() if verdict.cases)
    origins = {pair: origin for pair, origin in ledger.origins.items() if pair in ledger.verdicts}
    data = {
        "schema": SCHEMA,
        "fsdpcheck": __version__,
        "versions": ledger.versions,
        "plan": dataclasses.asdict(ledger.plan),
        "exit_code": ledger.exit_code,
        "interrupted": ledger.interrupted,
        "verdicts": [verdict.to_data() for verdict in ledger.verdicts.values()],
        "conditions": conditions(judged),
        "errors": [{"text": text, "exit_code": code} for text, code in ledger.errors],
        "began": ledger.began,
        "sources": {origin.key: ledger.sources[origin.key] for origin in origins.values()},
        "origins": [_origin(ledger.verdicts[pair], origin) for pair, origin in origins.items()],
    }
    return {**data, "digest": digest_of_document(data)}


def digest_of_document(data: Mapping[str, Any]) -> str:
    """The checksum over what all verdicts of a document share. Raises KeyError."""
    return digest([data[name] for name in _SEALED])


def digest_of_verdict(verdict: Mapping[str, Any], at: str, key: str) -> str:
    """The checksum over a verdict's data, when it was found out, and the key of the sources it was judged with."""
    return digest([verdict, at, key])


def digest_of_line(line: Mapping[str, Any]) -> str:
    """The checksum over a line of a journal."""
    return digest({name: value for name, value in line.items() if name != "digest"})


def _origin(verdict: Verdict, origin: Origin) -> dict[str, str]:
    sealed = digest_of_verdict(verdict.to_data(), origin.at, origin.key)
    pair = {"law": verdict.law, "adapter": verdict.adapter}
    return {**pair, "at": origin.at, "sources": origin.key, "digest": sealed}


class Journal:
    """Appends each verdict as a line of JSON to FILE.journal; ``close`` writes the document and removes the journal.

    ``goes_on``: what the journal of an earlier session holds is left there, for this one tells it again only later.
    """

    def __init__(self, file: Path, plan: Plan, goes_on: bool = False) -> None:
        if file.is_dir():
            raise UsageError(f"--json {file}: is a folder, wanted the name of a file")
        self._file, self._path = file, journal_of(file)
        try:
            self._lines = self._path.open("a" if goes_on else "w", encoding="utf-8")
            if self._lines.tell():
                self._lines.write("\n")  # ends the half line of a killed writer
            self._write({"event": "began", "fsdpcheck": __version__, "plan": dataclasses.asdict(plan)})
        except OSError as error:
            raise UsageError(f"--json {file}: cannot be written: {error.strerror}") from error

    def note(self, event: Mapping[str, Any]) -> None:
        if event["event"] in _KEPT:
            self._write(event)

    def _write(self, event: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({**event, "digest": digest_of_line(event)}) + "\n")
        self._lines.flush()

    def leave(self) -> None:
        """Close the journal and let it stand, for a session that came to no end."""
        self._lines.close()

    def close(self, ledger: Ledger) -> None:
        """Write the document in place of the journal. Raises UsageError where it cannot; then the journal stays."""
        self._lines.close()
        whole = self._file.with_name(self._file.name + ".part")
        try:
            whole.write_text(json.dumps(document(ledger), indent=1) + "\n", encoding="utf-8")
            os.replace(whole, self._file)
        except OSError as error:
            whole.unlink(missing_ok=True)
            kept = f"the verdicts are in {self._path}"
            raise UsageError(f"--json {self._file}: cannot be written: {error.strerror}; {kept}") from error
        self._path.unlink()
