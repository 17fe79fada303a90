"""Witnesses: for each planted fault a case of a law that kills it, kept as a replay token in tests/witnesses.json.

``python -m benchmarks witnesses [GLOB]``: searches for each fault whose name matches, and each law that no fault names
alone, as the nightly tier of tests/laws/test_faults_are_caught.py does, and writes the file anew after each one found.
That test runs the witnesses alone by day: a search is derandomised, so that it would find the same case every day.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path
from typing import Final

from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.impl import faults
from fsdpcheck.impl.faults._fault import Fault
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

FILE: Final = Path(__file__).parent.parent / "tests" / "witnesses.json"


def wanted() -> Iterator[tuple[str, list[tuple[Law, Fault]]]]:
    """(name of a fault or a law, the pairs of which one must kill), for all that must be killed or kill."""
    laws = chapters()
    for fault in faults.ALL.values():
        yield fault.name, [(law, fault) for name, law in laws.items() if fnmatch(name, fault.caught_by)]
    alone = {fault.caught_by for fault in faults.ALL.values()}
    for name, law in laws.items():
        if name not in alone:
            yield name, [(law, fault) for fault in faults.ALL.values() if fnmatch(name, fault.caught_by)]


def token(law: Law, fault: Fault, simulated: SimulatedEngine, real: ProcessesEngine) -> str:
    """The token of the first case that breaks ``law`` under ``fault``; "" if none does or planted code raises."""
    engine: Engine = real if law.on_real_ranks else simulated
    run = Run(engine, fault.subject, installs=(f"fsdpcheck.impl.faults:{fault.name}",))
    verdict = check_law(law, run, "ci", shrink=False)
    if verdict.finding is None or verdict.finding.kind == "raised":
        return ""
    return verdict.finding.token


def lines(glob: str = "*") -> Iterator[str]:
    """A line for each name as its witness is found or missed; the file keeps those of names that do not match."""
    kept: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    engine, real = SimulatedEngine(), ProcessesEngine()
    try:
        known = dict(wanted())
        kept = {name: text for name, text in kept.items() if name in known}
        for name, pairs in known.items():
            if fnmatchcase(name, glob):
                found = next((text for pair in pairs if (text := token(*pair, engine, real))), "")
                kept.pop(name, None)
                kept |= {name: found} if found else {}
                FILE.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n", encoding="utf-8")
                yield f"{name}: {found or 'no case kills it'}"
    finally:
        engine.close()
        real.close()
