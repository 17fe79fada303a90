"""Each implementation that comes with an adapter: its lines, the laws it promises and keeps, and what is found.

An honest one must keep every law it promises, else that is a false alarm or a defect that nobody has looked at. Of a
variant that shows a defect, at least one law must break, and each finding is confirmed on real gloo processes.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from benchmarks import soak
from benchmarks.kept import Kept
from benchmarks.revision import revision
from fsdpcheck import adapters

RECORD: Final = Path(__file__).parent / "implementations.jsonl"
_PACKAGES: Final = re.compile(r"/\S*?/site-packages/")
"""Where packages are on the machine that ran it."""
_DEFECTS: Final = (
    "opacus", "opacus:few_rows", "opacus:empty_ranks", "opacus:padding_idx", "opacus:summing", "opacus:bags",
    "opacus:unbiased", "opacus:beside", "opacus:poisson", "opacus:one_stream",
    "opacus_ddp:padding_idx",
    "fsdp1:hybrid_of_one", "fsdp1:tied_apart", "fsdp1:passed_on", "fsdp1:unsynced", "fsdp1:hooked",
    "tensor_parallel:empty_ranks", "tensor_parallel:few_rows", "fully_shard:by_the_book", "fully_shard:inferring",
    "fully_shard:routed", "sequence_parallel:thawing", "deepspeed:zero1_read",
)  # fmt: skip
"""Variants that promise what the implementation does not keep; docs/findings.md has each."""


def lines(
    file: str = str(RECORD), glob: str = "*", profile: str = "quick", shard: tuple[int, int] = (1, 1)
) -> Iterator[str]:
    """A row of a Markdown table for each; those of ``file`` are not run again."""
    kept = Kept(file, "adapter", "ranks")
    chosen = [(name, ranks) for name, ranks in _every() if fnmatch(name, glob)][shard[0] - 1 :: shard[1]]
    for name, ranks in chosen:
        if (name, soak.ranks_in_words(ranks)) not in kept:
            kept.add({**_row(name, ranks, profile), "honest": name not in _DEFECTS, "commit": revision()})
    rows = kept.rows
    yield from table(rows)
    honest = [row for row in rows if row["honest"]]
    silent = [row["adapter"] for row in rows if not row["honest"] and not row["findings"]]
    yield f"{len(honest)} honest ones: {sum(row['cases'] for row in honest):,} cases, " + (
        "; ".join(f"{row['adapter']}: {finding}" for row in honest for finding in row["findings"]) or "nothing found"
    )
    yield f"{len(rows) - len(honest)} with a known defect: " + (
        f"nothing found of {', '.join(silent)}" if silent else "each is found"
    )


def table(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a Markdown table of ``rows``; how many lines an adapter has is counted now."""
    yield "| adapter | lines | laws promised | held | cases | findings | confirmed on gloo | seconds of one core |"
    yield "|---|---|---|---|---|---|---|---|"
    yield from map(_in_table, rows)


def code_lines(source: str) -> int:
    """Lines of code: no blank ones, comments or docstrings."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    every = enumerate(source.splitlines(), 1)
    return sum(bool(text.strip()) and text.lstrip()[0] != "#" and number not in told for number, text in every)


def _every() -> list[tuple[str, tuple[int, ...]]]:
    known = soak.honest()
    return [*known, *((name, ()) for name in _DEFECTS if soak.installed(name))]


def _row(adapter: str, ranks: tuple[int, ...], profile: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = ["--adapter", adapter, "--profile", profile, "--json", str(report)]
        asked += ["--world-size", ",".join(map(str, ranks))] if ranks else []
        ran = subprocess.run([sys.executable, "-m", "fsdpcheck", "run", *asked], capture_output=True, text=True)
        if ran.returncode not in {0, 1}:
            raise RuntimeError(f"fsdpcheck run --adapter {adapter} ended with {ran.returncode}: {ran.stderr[-500:]}")
        verdicts = json.loads(report.read_text(encoding="utf-8"))["verdicts"]
    judged = [verdict for verdict in verdicts if verdict["status"] not in {"not promised", "not asked"}]
    broken = [verdict for verdict in judged if verdict["status"] != "holds"]
    found = [one for verdict in broken if verdict["finding"] for one in (verdict["finding"], *verdict["behind"])]
    return {
        "adapter": adapter,
        "ranks": soak.ranks_in_words(ranks),
        "promised": len(judged),
        "held": len(judged) - len(broken),
        "cases": sum(verdict["cases"] for verdict in judged),
        "findings": [f"{verdict['law']}: {_said(verdict)}" for verdict in broken],
        "confirmed": dict(Counter(one["confirmed"] for one in found)),
        "seconds": round(sum(verdict["seconds"] for verdict in judged), 1),
        "profile": profile,
    }


def _lines(adapter: str) -> str:
    """Those of what trains, and of what is promised besides, where that is a module of its own."""
    files = adapters.files_of(adapter.partition(":")[0])
    return " + ".join(str(code_lines(file.read_text(encoding="utf-8"))) for file in files)


def _said(verdict: dict[str, Any]) -> str:
    finding = verdict["finding"]
    if not finding:
        return str(verdict["status"])
    said = _PACKAGES.sub("", f"{finding['what']}: got {finding['got']}, wanted {finding['wanted']}")
    return f"{said[:200]}..." if len(said) > 200 else said


def _in_table(row: Mapping[str, Any]) -> str:
    confirmed = ", ".join(f"{count} {word}" for word, count in row["confirmed"].items()) or "-"
    ranks = f" on {row['ranks']}" * bool(row["ranks"])
    counts = (row["promised"], row["held"], f"{row['cases']:,}", len(row["findings"]), confirmed, row["seconds"])
    return f"| `{row['adapter']}`{ranks} | {_lines(row['adapter'])} | {' | '.join(map(str, counts))} |"
