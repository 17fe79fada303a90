"""Where the time of a check goes: drawing, the oracle with its proof, the engine, the comparison. Process time."""

from __future__ import annotations

import time
from collections import Counter

from fsdpcheck import oracle, strategies
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import certificate
from fsdpcheck.strategies.enumeration import distinct


def report(count: int = 100) -> str:
    """A line an adapter: cases a second of process time, and the share of each part."""
    engine = SimulatedEngine()
    lines = []
    for name in ("reference", "fully_shard", "fsdp1"):
        run = Run(engine, name)
        started = time.process_time()
        cases = distinct(strategies.cases_of(strategies.PLAIN, run.features), count)
        parts: Counter[str] = Counter({"draw": time.process_time() - started})  # type: ignore[dict-item]
        judged = 0
        for case in cases:
            clock = time.process_time
            marks = [clock()]
            answer = oracle.answer(case, run.features.factor)
            marks.append(clock())
            try:
                certificate.prove(case, answer)
            except NotExact:
                continue
            wanted = run.answer(case)  # cached for the engine's part below
            marks.append(clock())
            execution = run(case)
            marks.append(clock())
            assert_parameters_equal(execution, wanted)
            marks.append(clock())
            judged += 1
            for part, begin, end in zip(("oracle", "proof", "engine", "checks"), marks, marks[1:], strict=False):
                parts[part] += end - begin  # type: ignore[assignment]
        total = sum(parts.values())
        shares = ", ".join(f"{part} {100 * seconds / total:.0f} %" for part, seconds in parts.items())
        lines.append(f"{name}: {judged} checks, {judged / total:.1f} a second of process time; {shares}")
    engine.close()
    return "\n".join(lines)
