"""The JSON document of a session, of which any other form of report is made (document_reader.py reads it back)."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from fsdpcheck import __version__
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report.conditions import conditions
from fsdpcheck.session.journal import digest_of_document, digest_of_verdict
from fsdpcheck.session.ledger import Ledger, Origin

SCHEMA: Final = 8
"""Version of the document; it grows with every change that a reader could notice."""


def document(ledger: Ledger) -> dict[str, Any]:
    """The whole session as JSON data.

    {schema, fsdpcheck, versions, plan, folder, laws, guarantees, unaccepted, notes, exit_code, ended, interrupted,
    verdicts, conditions, errors, waived, began, sources, origins, digest}; report/schema.json is its JSON Schema.
    ``folder``: in which the session ran. ``laws``: all that were chosen, with their ``guarantees``. ``conditions``, of
    laws of which cases were judged: {pattern of their names (fnmatch): what their verdicts are conditional on}.
    ``waived``: token of a finding -> its waiver, in words. ``began``: when, ISO 8601. ``origins``: when each verdict
    was found out, and with which of the ``sources`` {key: provenance.Sources}. A digest is a checksum that tells a slip
    of a hand; it is no signature.
    """
    judged = (verdict.law for verdict in ledger.verdicts.values() if verdict.cases)
    origins = {pair: origin for pair, origin in ledger.origins.items() if pair in ledger.verdicts}
    data = {
        "schema": SCHEMA,
        "fsdpcheck": __version__,
        "versions": ledger.versions,
        "plan": dataclasses.asdict(ledger.plan),
        "folder": ledger.folder,
        "laws": list(ledger.laws),
        "guarantees": ledger.guarantees,
        "unaccepted": ledger.unaccepted,
        "notes": list(ledger.notes),
        "exit_code": ledger.exit_code,
        "ended": ledger.ended,
        "interrupted": ledger.interrupted,
        "verdicts": [verdict.to_data() for verdict in ledger.verdicts.values()],
        "conditions": conditions(judged),
        "errors": [{"text": text, "exit_code": code} for text, code in ledger.errors],
        "waived": dict(ledger.waived),
        "began": ledger.began,
        "sources": {origin.key: ledger.sources[origin.key] for origin in origins.values()},
        "origins": [_origin(ledger.verdicts[pair], origin) for pair, origin in origins.items()],
    }
    return {**data, "digest": digest_of_document(data)}


def _origin(verdict: Verdict, origin: Origin) -> dict[str, str]:
    sealed = digest_of_verdict(verdict.to_data(), origin.at, origin.key)
    pair = {"law": verdict.law, "adapter": verdict.adapter}
    return {**pair, "at": origin.at, "sources": origin.key, "digest": sealed}
