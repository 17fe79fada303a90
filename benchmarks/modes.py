"""The matrix of laws: every private law on every mode and both ways of sharding of the reference, W = 1 to 8.

``python -m benchmarks modes [FILE [PROFILE [VARIANT ...]]]`` judges what FILE (JSON lines, one a law and variant) does
not hold yet, tells each verdict as it comes, and prints the table of all that FILE holds. So it may be stopped and
taken up again, or run a variant at a time; delete FILE after a change of code. Without FILE nothing is kept. PROFILE:
cases a law and variant, "quick" (default), "ci" or "nightly". VARIANT: by default all eight, such as ``reference`` or
``reference_fsdp2:flash_bookkeeping``.

Norms immediate and deferred, contributions, layouts and layers are drawn by the cases themselves; the table counts the
first. A case of W ranks with fewer rows than ranks is counted as "rows < W".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.kept import Kept
from fsdpcheck.case import TrainingCase
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

WORLD_SIZES = tuple(range(1, 9))
LAWS = (
    "training.private*", "clipping.*", "norms.*", "deferred.*", "collectives.private", "noise.*", "privacy.*",
    "state.*",
)  # fmt: skip
VARIANTS = tuple(
    f"{way}{mode}"
    for way in ("reference", "reference_fsdp2")
    for mode in ("", ":bookkeeping", ":flash", ":flash_bookkeeping")
)


def lines(path: str = os.devnull, profile: str = "quick", *variants: str) -> Iterator[str]:
    """A line a verdict, then the table."""
    kept = Kept(path, "variant", "law")
    wanted = [found for name, found in chapters().items() if any(fnmatchcase(name, glob) for glob in LAWS)]
    engine = SimulatedEngine()
    for variant in variants or VARIANTS:
        for found in wanted:
            if (variant, found.name) not in kept:
                row = _judged(engine, variant, found, profile)
                kept.add(row)
                yield _told(row)
    engine.close()
    yield from table(kept.rows)


def _judged(engine: SimulatedEngine, variant: str, found: Law, profile: str) -> dict[str, Any]:
    """The verdict of one law on one variant, and what its cases were like, rejected ones too."""
    seen: set[TrainingCase] = set()
    run = Run(engine, variant)
    verdict = check_law(found, run, profile, WORLD_SIZES, on_case=lambda law, run, case: seen.add(case))
    facts = Counter(fact for case in seen for fact in _facts(case))
    finding = verdict.finding
    return {
        "variant": variant, "law": found.name, "status": verdict.status, "cases": verdict.cases,
        "rejected": verdict.rejected, "seconds": verdict.seconds, "drawn": dict(facts),
        "said": f"{finding.what}: {finding.token}" if finding else verdict.reason,
    }  # fmt: skip


def _facts(case: TrainingCase) -> list[str]:
    few = ["rows < W"] if case.layout.batch_size < case.world_size else []
    return [f"W = {case.world_size}", case.step.norms, *few]


def _told(row: dict[str, Any]) -> str:
    said = f": {row['said'].splitlines()[0]}" if row["said"] else ""
    return f"{row['variant']:<34} {row['law']:<32} {row['status']}, {row['cases']} cases, {row['seconds']:.0f} s{said}"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Laws by variants: how many cases hold, or what else became of it; sums; everything that does not hold."""
    variants = [variant for variant in VARIANTS if any(row["variant"] == variant for row in rows)]
    laws = list(dict.fromkeys(row["law"] for row in rows))
    by = {(row["variant"], row["law"]): row for row in rows}
    yield ""
    yield f"{'':<32}" + "".join(f"{variant.replace('reference', 'ref'):>26}" for variant in variants)
    for law in laws:
        yield f"{law:<32}" + "".join(f"{_cell(by.get((variant, law))):>26}" for variant in variants)
    judged = [row for row in rows if row["status"] == "holds"]
    drawn = sum((Counter(row["drawn"]) for row in judged), Counter[str]())
    facts = [*(f"W = {size}" for size in WORLD_SIZES), "rows < W", "immediate", "deferred"]
    cases, rejected = (sum(row[key] for row in rows) for key in ("cases", "rejected"))
    yield f"{cases} cases judged, {rejected} rejected"
    yield "drawn: " + ", ".join(f"{f} {drawn[f]}" for f in facts)
    findings = [row for row in rows if row["status"] not in ("holds", "not promised")]
    yield f"{len(judged)} laws hold, {len(findings)} do not"
    yield from (_told(row) for row in findings)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return str(row["cases"]) if row["status"] == "holds" else str(row["status"])
