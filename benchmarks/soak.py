"""Soak: honest implementations on many more cases than a night of one machine draws; every alarm is an error of ours.

``python -m benchmarks soak [MINUTES [FILE]] [--shard K/N]``: judges laws on the adapters that are known to be right, 60
cases of seeds from 1 on for each pair, and keeps a row a pair and seed in FILE (JSON lines; the project's record is
benchmarks/soak.jsonl). It begins no pair after MINUTES (default 10) and goes on with what FILE lacks. Shard K of N
takes each N-th pair, so that several machines share the work; ``cat`` puts their files together.

Rows say commit, releases, CPU and what torch takes it for, so that an alarm can be found again; a row's own command is
``fsdpcheck run --adapter ADAPTER --law LAW --profile ci --seed SEED``.
"""

from __future__ import annotations

import importlib.util
import itertools
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import hypothesis
import torch

from benchmarks.kept import Kept
from fsdpcheck import adapters
from fsdpcheck.check import check_law
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.law import chapters
from fsdpcheck.runner import Run
from fsdpcheck.verdict import Verdict

RECORD: Final = Path(__file__).parent / "soak.jsonl"
HONEST: Final = (
    "reference", "reference_fsdp2", "reference:bookkeeping", "fully_shard", "fsdp1", "opacus:sound",
)  # fmt: skip
"""Adapters of which every promised law must hold. Those of packages that are not installed are left for others."""
_PER_PAIR: Final = "ci"


def lines(minutes: int = 10, file: str = str(RECORD), shard: tuple[int, int] = (1, 1)) -> Iterator[str]:
    """A line for each pair that alarms, then the table of all that ``file`` holds."""
    kept, began = Kept(file, "adapter", "law", "seed"), time.monotonic()
    where, engine = _where(), SimulatedEngine()
    try:
        for adapter, law, seed in _work(shard):
            if time.monotonic() - began > 60 * minutes:
                break
            if (adapter, law, seed) not in kept:
                verdict = check_law(chapters()[law], Run(engine, adapter), _PER_PAIR, seed=seed)
                kept.add({**_row(verdict), "seed": seed, **where})
                if _alarms(kept.rows[-1]):
                    yield f"ALARM {adapter} {law} seed {seed}: {verdict.status} {verdict.reason or verdict.finding}"
    finally:
        engine.close()
    yield from table(kept.rows)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: judged cases and alarms by adapter, by number of ranks and by standard."""
    cases, alarms, labels = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        cases[row["adapter"]] += row["cases"]
        alarms[row["adapter"]] += _alarms(row)
        labels.update(row["labels"])
    yield "| adapter | pairs of law and seed | judged cases | alarms |"
    yield "|---|---|---|---|"
    for adapter in cases:
        pairs = sum(row["adapter"] == adapter for row in rows)
        yield f"| `{adapter}` | {pairs} | {cases[adapter]} | {alarms[adapter]} |"
    yield f"| all | {len(rows)} | {cases.total()} | {alarms.total()} |"
    yield ""
    yield ", ".join(f"{label}: {labels[label]}" for label in sorted(labels, key=_by_number))
    yield f"commits: {', '.join(sorted({row['commit'] for row in rows}))}; seeds: {sorted({r['seed'] for r in rows})}"


def _work(shard: tuple[int, int]) -> Iterator[tuple[str, str, int]]:
    """Every adapter, law and seed of this shard without end, a law by all adapters before the next one."""
    known = [name for name in HONEST if _installed(name)]
    for seed in itertools.count(1):
        pairs = [
            (name, law.name, seed)
            for law in chapters().values()
            for name in known
            if not law.not_promised(adapters.load(name).features)
        ]
        yield from pairs[shard[0] - 1 :: shard[1]]


def _installed(adapter: str) -> bool:
    package = adapter.partition(":")[0]
    return package != "opacus" or importlib.util.find_spec("opacus") is not None


def _row(verdict: Verdict) -> dict[str, Any]:
    counted = {label: n for label, n in verdict.census.items() if label.startswith(("W=", "tier "))}
    return {
        "adapter": verdict.adapter,
        "law": verdict.law,
        "status": verdict.status,
        "reason": verdict.reason[:400],
        "token": verdict.finding.token if verdict.finding else "",
        "cases": verdict.cases,
        "rejected": verdict.rejected,
        "labels": counted,
        "seconds": round(verdict.seconds, 1),
    }


def _alarms(row: Mapping[str, Any]) -> bool:
    return row["status"] != "holds"


def _where() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RECORD.parent)
    releases = f"python {platform.python_version()}, torch {torch.__version__}, hypothesis {hypothesis.__version__}"
    return {
        "commit": commit.stdout.strip(),
        "releases": releases,
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def _by_number(label: str) -> tuple[str, int]:
    name, equals, number = label.partition("=")
    return (name, int(number)) if equals else (label, 0)
