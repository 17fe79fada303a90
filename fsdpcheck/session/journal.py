"""The journal of a session, which has every finding before its document exists, and the checksums of both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.errors import UsageError, writing
from fsdpcheck.loading.provenance import digest
from fsdpcheck.session.plan import Plan

_KEPT = ("plan", "sources", "verdict", "confirmation", "error")


_SEALED: Final = ("fsdpcheck", "versions", "plan", "sources", "errors", "waived")
"""What of a document its own ``digest`` is over; verdicts have theirs."""


def journal_of(file: Path) -> Path:
    """Where the journal of a session lies that will write the document ``file``."""
    return file.with_name(file.name + ".journal")


def digest_of_document(data: Mapping[str, Any]) -> str:
    """The checksum over what all verdicts of a document share. Raises KeyError."""
    return digest([data[name] for name in _SEALED])


def digest_of_verdict(verdict: Mapping[str, Any], at: str, key: str) -> str:
    """The checksum over a verdict's data, when it was found out, and the key of the sources it was judged with."""
    return digest([verdict, at, key])


def digest_of_line(line: Mapping[str, Any]) -> str:
    """The checksum over a line of a journal."""
    return digest({name: value for name, value in line.items() if name != "digest"})


class Journal:
    """Appends each verdict as a line of JSON to FILE.journal; ``close`` writes the document and removes the journal.

    ``goes_on``: what the journal of an earlier session holds is left there, for this one tells it again only later.
    """

    def __init__(self, file: Path, plan: Plan, goes_on: bool = False) -> None:
        if file.is_dir():
            raise UsageError(f"--json {file}: is a folder, wanted the name of a file")
        self._file, self._path, self._full = file, journal_of(file), False
        try:
            self._lines = self._path.open("a" if goes_on else "w", encoding="utf-8")
            if self._lines.tell():
                self._lines.write("\n")  # ends the half line of a killed writer
            self._write({"event": "began", "fsdpcheck": __version__, "plan": dataclasses.asdict(plan)})
        except OSError as error:
            raise UsageError(f"--json {file}: cannot be written: {error.strerror}") from error

    def note(self, event: Mapping[str, Any]) -> None:
        """Keep an event. A disk that is full ends the keeping, and not the session, which is reported at its end."""
        if event["event"] in _KEPT and not self._full:
            try:
                self._write(event)
            except OSError:
                self._full = True

    def _write(self, event: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({**event, "digest": digest_of_line(event)}) + "\n")
        self._lines.flush()

    def leave(self) -> None:
        """Close the journal and let it stand, for a session that came to no end."""
        with suppress(OSError):  # what could not be written before cannot be now
            self._lines.close()

    def close(self, document: Mapping[str, Any]) -> None:
        """Write the document in place of the journal. Raises UsageError where it cannot; then the journal stays."""
        self.leave()
        try:
            writing.whole(self._file, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            kept = f"{'what had been found by then is' if self._full else 'the verdicts are'} in {self._path}"
            raise UsageError(f"--json {self._file}: cannot be written: {error.strerror}; {kept}") from error
        self._path.unlink()
