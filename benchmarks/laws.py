"""What each law is worth: who promises it, what a case of it costs, and which planted faults it kills, alone or shared.

``python -m benchmarks laws [N [LAW [FILE]]]``: N cases (default 4) of each law whose name matches, on a subject as it
is and again with each fault in place. The first of them must hold, so what breaks the others is the fault; code that
merely raises counts as no kill. A fault is killed *alone* when no other law kills it with so few cases. What FILE (JSON
lines, one a law) holds already is not measured again; the table is of all that it holds.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

from benchmarks.kept import Kept
from fsdpcheck.adapters import load
from fsdpcheck.check import check_law
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl import faults
from fsdpcheck.law import Law, chapters
from fsdpcheck.runner import Run

ADAPTERS: Final = ("reference", "reference_fsdp2", "fully_shard", "fsdp1")


def lines(count: int = 4, pattern: str = "*", path: str = os.devnull) -> Iterator[str]:
    """A line a law as it is done, then the table and the faults that no law kills so soon."""
    kept = Kept(path, "law", "asked")
    engine = SimulatedEngine()
    try:
        for name, law in chapters().items():
            if fnmatchcase(name, pattern) and (name, count) not in kept:
                row = _worth(engine, law, count)
                kept.add(row)
                yield f"{name}: {len(row['kills'])} of {len(faults.ALL)} faults"
    finally:
        engine.close()
    yield from _table([row for row in kept.rows if row["asked"] == count], count)


def _table(rows: list[dict[str, Any]], count: int) -> Iterator[str]:
    killers = Counter(name for row in rows for name in row["kills"])
    yield "| law | promised by | ms a case | faults killed | of them alone |"
    yield "| --- | --- | --- | --- | --- |"
    order = list(chapters())
    for row in sorted(rows, key=lambda row: order.index(row["law"])):
        alone = sorted(name for name in row["kills"] if killers[name] == 1)
        each = 1000 * row["seconds"] / max(1, row["cases"])
        promised = ", ".join(row["promised"]) if len(row["promised"]) < len(ADAPTERS) else "all four"
        cells = (row["law"], promised, f"{each:.0f}", str(len(row["kills"])), ", ".join(alone) or "-")
        yield "| " + " | ".join(cells) + " |"
    left = sorted(set(faults.ALL) - set(killers))
    yield f"{len(faults.ALL)} faults, {count} cases a law: killed by none: {', '.join(left) or '-'}"


def _worth(engine: SimulatedEngine, law: Law, count: int) -> dict[str, Any]:
    """Of one law: ``cases`` judged without a fault, in ``seconds`` of process time, and the faults that it kills."""
    promised = [name for name in ADAPTERS if not law.not_promised(load(name).features)]
    run = Run(engine, promised[0])
    check_law(law, run, seed=1, shrink=False, most=1)  # another case first: what is loaded once costs no law
    started = time.process_time()
    holds = check_law(law, run, shrink=False, most=count)
    assert holds.status == "holds", f"{law.name} without a fault: {holds.reason}"
    seconds = time.process_time() - started
    kills = sorted(name for name in faults.ALL if _kills(engine, law, name, count))
    return {
        "law": law.name, "asked": count, "promised": promised, "cases": holds.cases, "seconds": seconds, "kills": kills,
    }  # fmt: skip


def _kills(engine: SimulatedEngine, law: Law, fault: str, count: int) -> bool:
    run = Run(engine, faults.ALL[fault].subject, installs=(f"fsdpcheck.impl.faults:{fault}",))
    finding = check_law(law, run, shrink=False, most=count).finding
    return finding is not None and finding.kind != "raised"
