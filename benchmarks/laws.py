"""What each law is worth: who promises it, what a case of it costs, and which planted faults it kills, alone or shared.

``python -m benchmarks laws [N [LAW]]``: N cases (default 6) of each law whose name matches, on a subject as it is
and again with each fault in place. The first of them must hold, so what breaks the others is the fault; code that
merely raises counts as no kill. A fault is killed *alone* when no other law kills it with so few cases.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from fsdpcheck.adapters import load
from fsdpcheck.check import check_law
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl import faults
from fsdpcheck.law import Law, chapters
from fsdpcheck.runner import Run

ADAPTERS: Final = ("reference", "reference_fsdp2", "fully_shard", "fsdp1")


@dataclass(frozen=True)
class Worth:
    """Of one law: ``cases`` judged without a fault, in ``seconds`` of process time, and the faults it ``kills``."""

    law: Law
    promised: tuple[str, ...]
    cases: int
    seconds: float
    kills: frozenset[str]

    def row(self, killers: Counter[str]) -> str:
        """A row of the table; ``killers``: fault -> number of laws that kill it."""
        alone = sorted(name for name in self.kills if killers[name] == 1)
        each = 1000 * self.seconds / max(1, self.cases)
        promised = ", ".join(self.promised) if len(self.promised) < len(ADAPTERS) else "all four"
        cells = (self.law.name, promised, f"{each:.0f}", str(len(self.kills)), ", ".join(alone) or "-")
        return "| " + " | ".join(cells) + " |"


def lines(count: int = 6, pattern: str = "*") -> Iterator[str]:
    """A line a law as it is done, then the table and the faults that no law kills so soon."""
    engine = SimulatedEngine()
    worths = []
    try:
        for name, law in chapters().items():
            if fnmatchcase(name, pattern):
                worths.append(_worth(engine, law, count))
                yield f"{name}: {len(worths[-1].kills)} of {len(faults.ALL)} faults"
    finally:
        engine.close()
    killers = Counter(name for worth in worths for name in worth.kills)
    yield "| law | promised by | ms a case | faults killed | of them alone |"
    yield "| --- | --- | --- | --- | --- |"
    yield from (worth.row(killers) for worth in worths)
    left = sorted(set(faults.ALL) - set(killers))
    yield f"{len(faults.ALL)} faults, {count} cases a law: killed by none: {', '.join(left) or '-'}"


def _worth(engine: SimulatedEngine, law: Law, count: int) -> Worth:
    promised = tuple(name for name in ADAPTERS if not law.not_promised(load(name).features))
    started = time.process_time()
    holds = check_law(law, Run(engine, promised[0]), shrink=False, most=count)
    assert holds.status == "holds", f"{law.name} without a fault: {holds.reason}"
    seconds = time.process_time() - started
    kills = frozenset(name for name in faults.ALL if _kills(engine, law, name, count))
    return Worth(law, promised, holds.cases, seconds, kills)


def _kills(engine: SimulatedEngine, law: Law, fault: str, count: int) -> bool:
    run = Run(engine, faults.ALL[fault].subject, installs=(f"fsdpcheck.impl.faults:{fault}",))
    finding = check_law(law, run, shrink=False, most=count).finding
    return finding is not None and finding.kind != "raised"
