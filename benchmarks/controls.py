"""Controls (tests/controls): variants that look suspicious and are right. Each finding is a false alarm.

``python -m benchmarks controls [FILE [GLOB [SEED ...]]] [--shard K/N]``: the laws that a control names and its adapter
promises, in the quick profile, on the cases of each seed (0). A row a control, law and seed is kept in FILE (JSONL;
by default the project's record, benchmarks/controls.jsonl; "-" for none) with the commit; what it holds is not run
again. At the end the sums: of FILE, and of what the nights have judged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import Kept
from benchmarks.night.record import Record
from benchmarks.revision import revision
from fsdpcheck.adapters import load
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from tests.controls.variants import ALL, Control

RECORD: Final = Path(__file__).parent / "controls.jsonl"


def lines(file: str = str(RECORD), pattern: str = "*", *seeds: int, shard: tuple[int, int] = (1, 1)) -> Iterator[str]:
    """A line for each control, law and seed as it is done, then how many cases all rows have, and the reports."""
    kept = Kept(os.devnull if file == "-" else file, "control", "law", "seed")
    named = [one for one in ALL.values() if fnmatchcase(one.name, pattern)]
    asked = [(one, law, seed) for seed in seeds or (0,) for one in named for law in laws_of(one)]
    engine = SimulatedEngine()
    try:
        for control, law, seed in asked[shard[0] - 1 :: shard[1]]:
            if (control.name, law.name, seed) not in kept:
                row = {"control": control.name, "law": law.name, "seed": seed, "commit": revision()}
                kept.add({**row, **judged(engine, control, law, seed=seed)})
                yield told(kept.rows[-1])
    finally:
        engine.close()
    yield summary(kept.rows)
    yield by_night(Record().rows)


def laws_of(control: Control) -> list[Law]:
    """The laws that may be suspicious of a control, of those that its adapter promises."""
    features = load(control.adapter).features
    named = [law for name, law in chapters().items() if any(fnmatchcase(name, one) for one in control.laws)]
    return [law for law in named if not (law.file or law.on_real_ranks or law.not_promised(features))]


def judged(
    engine: SimulatedEngine, control: Control, law: Law, most: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """What came of one law: status, cases, hits of the altered line, and what was reported."""
    run = Run(engine, control.adapter, installs=(f"tests.controls.variants:{control.name}",))
    started = time.monotonic()
    verdict = check_law(law, run, most=most, seed=seed, shrink=False)
    found = verdict.finding
    told = (
        "" if found is None else f"{found.what}; got {found.got}; wanted {found.wanted}; {found.where}; {found.token}"
    )
    idle = "never hit" in verdict.reason
    seconds = round(time.monotonic() - started, 1)
    return {
        "status": verdict.status, "cases": verdict.cases, "hit": not idle, "reported": told[:2000],
        "reason": verdict.reason[:300], "seconds": seconds,
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    hit = "" if row["hit"] else ", never hit"
    return f"{row['control']} {row['law']}: {row['status']}, {row['cases']} cases{hit} {row['reported']}".rstrip()


def by_night(rows: list[dict[str, Any]]) -> str:
    """The rows of the nights: how often any case was judged under a control there, and how many reports there are."""
    own = [row for row in rows if row["part"] == "tests/controls" and "judged" in row]
    named = {item for row in own for item in row["judged"]}
    cases = sum(sum(row["judged"].values()) for row in own)
    return f"by night: {len(named)} controls, {cases:,} cases: {sum(len(row['findings']) for row in own)} reported"


def summary(rows: list[dict[str, Any]]) -> str:
    """All rows: cases in which an altered line may have run, and how many reports there are."""
    live = [row for row in rows if row["hit"]]
    wrong = [row for row in rows if row["status"] != "holds"]
    named = len({row["control"] for row in live})
    return f"{named} controls, {sum(row['cases'] for row in live)} cases: {len(wrong)} reported"
