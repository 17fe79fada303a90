"""Mechanisms of public reports (tests/mechanisms, frozen): which are found, and is the place or the cause right?

``python -m benchmarks mechanisms [FILE [GLOB [LAWS]]]``, with ``--shard K/N``: each mechanism is planted in the adapter
that reaches it, and every law that the adapter promises is judged, in the order of ``fsdpcheck list laws``: in
``quick``, and where nothing was found again in ``ci``, when all others are done. The first finding ends it. A row is
kept in FILE (JSON lines; by default the project's record, benchmarks/mechanisms.jsonl) with the commit; what it holds
is not run again.

A law draws the same cases whichever laws were asked before it, so what one finds in ``ci`` is found in ``ci``: with the
pattern LAWS only these are asked of a mechanism, which takes minutes, and a row says so (``asked``). One that these do
not find is not kept: others might.

``python -m benchmarks mechanisms-now``: what the law that found each in that record says today of the case that it was
found in, in a record beside it (benchmarks/mechanisms_now.jsonl), and both scores. So what is said is compared, and not
what is drawn: whether a law finds it today is asked by a new record.

How they are scored is in benchmarks/mechanism_scores.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from benchmarks import mechanism_scores
from benchmarks.kept import Kept
from benchmarks.mechanism_scores import score
from benchmarks.revision import revision
from fsdpcheck.adapters import load
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings import tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from tests.mechanisms.planted import ALL
from tests.mechanisms.planting import Mechanism

RECORD: Final = Path(__file__).parent / "mechanisms.jsonl"
NOW: Final = Path(__file__).parent / "mechanisms_now.jsonl"
_PROFILES: Final = ("quick", "ci")
_QUOTED: Final = (
    "law",
    "kind",
    "place",
    "what",
    "got",
    "wanted",
    "where",
    "cause",
    "note",
    "when",
    "stage",
    "quantity",
    "lines",
    "words",
    "token",
)


def lines(
    file: str = str(RECORD), pattern: str = "*", laws: str = "*", shard: tuple[int, int] = (1, 1)
) -> Iterator[str]:
    """A line a mechanism as it is done, then the score of all that ``file`` holds."""
    kept = Kept(file, "mechanism", "profile")
    mine = [one for one in ALL.values() if one.adapter and fnmatchcase(one.name, pattern)][shard[0] - 1 :: shard[1]]
    engine = SimulatedEngine()
    try:
        for profile in _PROFILES:
            found = {row["mechanism"] for row in kept.rows if row["finding"] is not None}
            for mechanism in mine:
                if mechanism.name in found or (mechanism.name, profile) in kept:
                    continue
                row = {"mechanism": mechanism.name, "commit": revision(), **_judged(engine, mechanism, profile, laws)}
                if laws == "*" or row["finding"] is not None:
                    kept.add(row if laws == "*" else {**row, "asked": laws})
                    yield told(row)
                else:
                    yield f"{told(row)}, asked {laws} alone: not kept"
    finally:
        engine.close()
    yield from score(kept.rows)


def now(into: str = str(NOW), pattern: str = "*") -> Iterator[str]:
    """A line a mechanism that the record has a finding of, whose case that law judges again; then both scores."""
    first, kept = Kept(str(RECORD), "mechanism", "profile"), Kept(into, "mechanism", "profile")
    engine = SimulatedEngine()
    try:
        for row in first.rows:
            name, profile = row["mechanism"], row["profile"]
            if row["finding"] is None or (name, profile) in kept or not fnmatchcase(name, pattern):
                continue
            kept.add({"mechanism": name, "commit": revision(), **_again(engine, ALL[name], profile, row["finding"])})
            yield told(kept.rows[-1])
    finally:
        engine.close()
    again = {row["mechanism"] for row in kept.rows}
    yield "in the record:"
    yield from score([row for row in first.rows if row["mechanism"] in again])
    yield "now:"
    yield from score(kept.rows)


def _judged(engine: SimulatedEngine, mechanism: Mechanism, profile: str, law_name: str = "*") -> dict[str, Any]:
    """Of one mechanism: its first finding, or none; what was judged, and what judging it took."""
    run = Run(engine, mechanism.adapter, installs=(f"tests.mechanisms.planted:{mechanism.name}",))
    features = load(mechanism.adapter).features
    chosen = [law for name, law in chapters().items() if fnmatchcase(name, law_name)]
    promised = [law for law in chosen if not law.not_promised(features)]
    started, cases, beside = time.monotonic(), 0, []
    for number, law in enumerate(promised):
        verdict = check_law(law, run, profile)
        cases += verdict.cases
        if verdict.finding is not None:
            return _row(profile, number + 1, cases, started, beside, verdict)
        if verdict.status != "holds":
            beside.append(f"{law.name}: {verdict.status}, {verdict.reason}"[:300])
    return _row(profile, len(promised), cases, started, beside, None)


def _again(engine: SimulatedEngine, mechanism: Mechanism, profile: str, finding: dict[str, Any]) -> dict[str, Any]:
    """The row of a case that was found before."""
    run = Run(engine, mechanism.adapter, installs=(f"tests.mechanisms.planted:{mechanism.name}",))
    started, token = time.monotonic(), tokens.decode(finding["token"])
    verdict = check_case(chapters()[token.law], run, token.case)
    found, beside = (
        (verdict, []) if verdict.finding is not None else (None, [f"{verdict.status}, {verdict.reason}"[:300]])
    )
    return _row(profile, 1, verdict.cases, started, beside, found)


def _row(
    profile: str, laws: int, cases: int, started: float, beside: list[str], verdict: Verdict | None
) -> dict[str, Any]:
    finding = None if verdict is None else verdict.finding
    quoted = {name: getattr(finding, name, "") for name in _QUOTED} if finding is not None else None
    seconds = round(time.monotonic() - started, 1)
    return {
        "profile": profile, "laws": laws, "cases": cases, "seconds": seconds, "beside": beside, "finding": quoted,
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """What came of one mechanism, in a line or two."""
    if row["finding"] is None:
        return f"{row['profile']:<6} {row['mechanism']}: survived ({row['cases']} cases of {row['laws']} laws)"
    found = row["finding"]
    words = (
        f"quantity {mechanism_scores.quantity(row)}, window {mechanism_scores.window(row)}, cause"
        f" {mechanism_scores.cause(row)}: {found['cause'] or '-'}"
    )
    return f"{row['profile']:<6} {row['mechanism']}: {found['law']}, {found['what']}: {words}"
