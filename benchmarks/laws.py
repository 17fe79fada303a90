"""What each law is worth: who promises it, what a case of it costs, and which planted faults it kills, alone or shared.

``python -m benchmarks laws [N [LAW [FILE [REPORT,...]]]]``: N cases (default 4) of each law whose name matches, on a
subject as it is and again with each fault in place. The first of them must hold, so what breaks the others is the
fault; code that merely raises counts as no kill. Laws of samplers and kernels are asked of the faults in those, other
laws of all others. A fault is killed *alone* when no other law kills it with so few cases. What FILE (JSON lines, one a
law) holds already is not measured again; the table is of all that it holds. REPORT, written by ``fsdpcheck run --json
REPORT``, tells how many cases judged each adapter there; several are set apart by commas.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from benchmarks.kept import Kept
from fsdpcheck.adapters import load
from fsdpcheck.adapters.contract import WITHOUT_MODEL
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl import faults
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

ADAPTERS: Final = ("reference", "reference_fsdp2", "fully_shard", "fsdp1")
VARIANTS: Final = ("reference:bookkeeping",)
"""Asked of the laws that none of ``ADAPTERS`` promises."""


def lines(count: int = 4, pattern: str = "*", path: str = os.devnull, reports: str = "") -> Iterator[str]:
    """A line a law as it is done, then the table and the faults that no law kills so soon."""
    cases = _cases(reports)
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
    yield from table([row for row in kept.rows if row["asked"] == count], cases)
    left = sorted(set(faults.ALL).difference(*(row["kills"] for row in kept.rows if row["asked"] == count)))
    yield f"{len(faults.ALL)} faults, {count} cases a law: killed by none: {', '.join(left) or '-'}"


def table(rows: list[dict[str, Any]], cases: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """Lines of Markdown; ``cases``: (adapter, law) -> how many it was judged by, of those that promise it."""
    adapters = list(dict.fromkeys((*ADAPTERS, *(adapter for adapter, _ in cases))))
    killers = Counter(name for row in rows for name in row["kills"])
    yield "| " + " | ".join(("law", *adapters, "ms a case", "faults shared", "faults killed alone")) + " |"
    yield "|---" * (len(adapters) + 4) + "|"
    order = list(chapters())
    for row in sorted(rows, key=lambda row: order.index(row["law"])):
        alone = [name for name in row["kills"] if killers[name] == 1]
        promised = ("yes" if name in row["promised"] else "-" for name in adapters)
        judged = (str(cases.get((name, row["law"]), says)) for name, says in zip(adapters, promised, strict=True))
        each = 1000 * row["seconds"] / max(1, row["cases"])
        killed = (str(len(row["kills"]) - len(alone)), ", ".join(alone) or "-")
        yield "| " + " | ".join((row["law"], *judged, f"{each:.0f}", *killed)) + " |"


def _cases(reports: str) -> dict[tuple[str, str], int]:
    documents = (json.loads(Path(path).read_text(encoding="utf-8")) for path in reports.split(",") if path)
    verdicts = (each for document in documents for each in document["verdicts"])
    return {(each["adapter"], each["law"]): each["cases"] for each in verdicts if each["status"] != "not promised"}


def _worth(engine: SimulatedEngine, law: Law, count: int) -> dict[str, Any]:
    """Of one law: ``cases`` judged without a fault, in ``seconds`` of process time, and the faults that it kills."""
    promised = [name for name in (*ADAPTERS, *VARIANTS) if not law.not_promised(load(name).features)]
    run = Run(engine, promised[0])
    check_law(law, run, seed=1, shrink=False, most=1)  # another case first: what is loaded once costs no law
    started = time.process_time()
    holds = check_law(law, run, shrink=False, most=count)
    assert holds.status == "holds", f"{law.name} without a fault: {holds.reason}"
    seconds = time.process_time() - started
    kills = sorted(name for name in _within_reach(law) if _kills(engine, law, name, count))
    return {
        "law": law.name, "asked": count, "promised": promised, "cases": holds.cases, "seconds": seconds, "kills": kills,
    }  # fmt: skip


def _within_reach(law: Law) -> list[str]:
    """Faults that a case of the law may meet: what trains nothing meets none in training, and the other way round."""
    laws, trains = chapters(), law.promise not in WITHOUT_MODEL
    found = []
    for name, fault in faults.ALL.items():
        intended = next(own for own in laws.values() if fnmatchcase(own.name, fault.caught_by))
        if (intended.promise not in WITHOUT_MODEL) == trains:
            found.append(name)
    return found


def _kills(engine: SimulatedEngine, law: Law, fault: str, count: int) -> bool:
    run = Run(engine, faults.ALL[fault].subject, installs=(f"fsdpcheck.impl.faults:{fault}",))
    finding = check_law(law, run, shrink=False, most=count).finding
    return finding is not None and finding.kind != "raised"
