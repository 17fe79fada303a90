"""Soak: honest implementations on many more cases than a night of one machine draws; every alarm is an error of ours.

``python -m benchmarks soak [MINUTES [FILE [SEED]]] [--shard K/N]``: judges laws on the adapters that are known to be
right, 60 cases of seeds from SEED (default 1) on for each pair, and keeps a row a pair and seed in FILE (JSON lines;
the project's record is benchmarks/soak.jsonl). It begins no pair after MINUTES (default 10) and goes on with what FILE
lacks. Shard K of N takes each N-th pair, so that several machines share the work; ``cat`` puts their files together.
The adapter on which least processor time was spent comes next, so that all have as much; laws come in an order of their
own for each seed, so that a part of them is no chapter.

A judged case was drawn, proved exact (or bounded) and compared. "Too few cases" is no alarm about an implementation; it
is counted beside them, and looked at: without a budget or a restriction it is our own drawing.

Rows say commit, releases, CPU and what torch takes it for, so that an alarm can be found again; a row's own command is
``fsdpcheck run --adapter ADAPTER --law LAW --profile ci --seed SEED``, with ``--world-size RANKS`` where it names some.
"""

from __future__ import annotations

import importlib.util
import itertools
import platform
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import hypothesis
import torch

from benchmarks.kept import Kept
from benchmarks.revision import revision
from fsdpcheck import adapters
from fsdpcheck.adapters.contract import WITHOUT_MODEL
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

RECORD: Final = Path(__file__).parent / "soak.jsonl"
HONEST: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("reference", ()), ("reference_fsdp2", ()), ("reference:bookkeeping", ()), ("fully_shard", ()), ("fsdp1", ()),
    ("opacus:sound", ()), ("ddp", ()), ("ddp", (3, 5, 7, 13)), ("zero_redundancy", ()), ("tensor_parallel", ()),
    ("sequence_parallel", ()), ("pipeline", ()), ("pipeline:one_f_one_b", ()), ("ddp:finding_unused", ()),
    ("accelerate", ()), ("lightning_fabric", ()), ("deepspeed:zero1", ()), ("deepspeed:zero2", ()),
    ("deepspeed:zero3", ()), ("opacus_ddp", ()), ("opacus_ddp:ghost", ()), ("torchtitan", ()),
)  # fmt: skip
"""(adapter, numbers of ranks; () for the profile's) of which every promised law must hold.

Adapters of packages that are not installed are left for others. DDP divides before it sums, which is inexact at every
number of ranks but powers of two.
"""
_PER_PAIR: Final = "ci"
_FEW: Final = "too few cases"


def lines(minutes: int = 10, file: str = str(RECORD), seed: int = 1, shard: tuple[int, int] = (1, 1)) -> Iterator[str]:
    """A line for each pair that alarms or has too few cases, then the table of all that ``file`` holds.

    Seeds are ``seed`` and those that follow.
    """
    kept, began = Kept(file, "adapter", "ranks", "law", "seed"), time.monotonic()
    where, engine, spent = _where(), SimulatedEngine(), Counter[tuple[str, str]]()
    for row in kept.rows:
        spent[row["adapter"], row["ranks"]] += row["processor seconds"]
    waiting = {(name, ranks_in_words(ranks)): _pairs(name, seed, shard) for name, ranks in honest()}
    try:
        while time.monotonic() - began < 60 * minutes:
            name, ranks = min(waiting, key=lambda one: spent[one])
            law, own = next(pair for pair in waiting[name, ranks] if (name, ranks, *pair) not in kept)
            row = {**_judged(engine, name, ranks, law, own), **where}
            kept.add(row)
            spent[name, ranks] += row["processor seconds"]
            if row["status"] != "holds":
                said = f"{name} {ranks} {law} seed {own}: {row['status']} {row['reason']} {row['token']}"
                yield f"{'ALARM' if alarms(row) else 'FEW'} {said}"
    finally:
        engine.close()
    yield from table(kept.rows)


def _judged(engine: SimulatedEngine, adapter: str, ranks: str, law: str, seed: int) -> dict[str, Any]:
    """The row of one pair."""
    started, sizes = time.process_time(), tuple(map(int, filter(None, ranks.split(","))))
    verdict = check_law(chapters()[law], Run(engine, adapter), _PER_PAIR, sizes, seed=seed)
    spent = round(time.process_time() - started, 1)
    return {**_row(verdict), "processor seconds": spent, "ranks": ranks, "seed": seed}


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """As a report has them; "" for the profile's."""
    return ",".join(map(str, ranks))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: judged cases, alarms and pairs of too few cases by adapter; cases by standard and by ranks."""
    by_adapter: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_adapter.setdefault(f"`{row['adapter']}`" + f" on {row['ranks']}" * bool(row["ranks"]), []).append(row)
    tiers = sorted({label for row in rows for label in row["labels"] if label.startswith("tier ")})
    yield f"| adapter | laws and seeds | judged cases | {' | '.join(tiers)} | alarms | too few cases |"
    yield f"|---|---|---|{'---|' * len(tiers)}---|---|"
    for name, found in [*by_adapter.items(), ("all", rows)]:
        labels = _labels(found)
        cells = [name, len(found), sum(row["cases"] for row in found), *(labels[tier] for tier in tiers)]
        cells += [sum(map(alarms, found)), sum(row["status"] == _FEW for row in found)]
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    for name, found in by_adapter.items():
        labels = _labels(found)
        worlds = sorted((label for label in labels if label.startswith("W=")), key=lambda label: int(label[2:]))
        yield f"{name}: {', '.join(f'{label}: {labels[label]}' for label in worlds)}"
    told = sorted({(row["adapter"], text) for row in rows for text in row.get("left", ())})
    yield "told of the process: " + ("; ".join(f"{name}: {text}" for name, text in told) or "nothing")
    yield f"commits: {', '.join(sorted({row['commit'] for row in rows}))}; seeds: {sorted({r['seed'] for r in rows})}"


def _labels(rows: list[dict[str, Any]]) -> Counter[str]:
    counted = Counter[str]()
    for row in rows:
        counted.update(row["labels"])
    return counted


def honest() -> list[tuple[str, tuple[int, ...]]]:
    """Those of HONEST that are installed."""
    return [(name, ranks) for name, ranks in HONEST if installed(name)]


def promised(adapter: str) -> list[str]:
    """The laws that simulated ranks of it are judged by: those that it promises, and no adapter it is a variant of."""
    features = adapters.load(adapter).features
    found = [one for one in chapters().values() if not (one.on_real_ranks or one.not_promised(features))]
    return [one.name for one in found if not (_a_variant(adapter) and one.promise in WITHOUT_MODEL)]


def _pairs(adapter: str, first: int, shard: tuple[int, int]) -> Iterator[tuple[str, int]]:
    """The laws that the adapter promises, seed after seed from the first on, of this shard; without end."""
    laws = promised(adapter)
    every = ((law, seed) for seed in itertools.count(first) for law in random.Random(seed).sample(laws, len(laws)))
    return itertools.islice(every, shard[0] - 1, None, shard[1])


def _a_variant(adapter: str) -> bool:
    """Whether its samplers and kernels, which know no adapter, are those of another honest one."""
    base, colon, _ = adapter.partition(":")
    return bool(colon) and any(name == base for name, _ in HONEST)


def installed(adapter: str) -> bool:
    """Whether the package of the adapter is there."""
    package = adapter.partition(":")[0].removesuffix("_ddp")
    return not adapters.needs_extra(adapter) or importlib.util.find_spec(package) is not None


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
        "left": list(verdict.left),
        "seconds": round(verdict.seconds, 1),
    }


def alarms(row: Mapping[str, Any]) -> bool:
    """Whether a row says that a law does not hold, or broke."""
    return row["status"] not in ("holds", _FEW)


def _where() -> dict[str, str]:
    releases = f"python {platform.python_version()}, torch {torch.__version__}, hypothesis {hypothesis.__version__}"
    return {
        "commit": revision(),
        "releases": releases,
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
