"""Source mutants of the reference (docs/faults.md): what became of each, and of each that survived why.

``python -m benchmarks mutants`` counts the record, benchmarks/mutants.jsonl. Its rows are those that ``fsdpcheck faults
--adapter reference --mutants 300 --keep FILE`` has judged, seed 0, each with the commit, and a mutant whose outcome was
doubtful, or whose cases were drawn later, as it was judged last. Who survived has a ``kind`` and a ``reason``; of those
of the kind "same" the reasons are in benchmarks/mutants_equivalent.json too, which the command takes as
``--equivalent``.
Who changes nothing may have ``read``: "equivalent", "no case" of a law has what would show it, or "other cases" would;
and the reason. ``adapter``: where it is not the reference that judged it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

RECORD: Final = Path(__file__).parent / "mutants.jsonl"
EQUIVALENT: Final = Path(__file__).parent / "mutants_equivalent.json"
SAME: Final = "same"
"""The kind of a survivor whose results differ by rounding alone, or by nothing."""


def rows() -> list[dict[str, Any]]:
    """Those of the record."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def effective(judged: list[dict[str, Any]]) -> tuple[int, int]:
    """(mutants that laws kill, those that compute something else): who raises at once is killed too."""
    killed = [row for row in judged if row["outcome"] in ("killed", "raises at once")]
    survived = [row for row in judged if row["outcome"] == "survived" and row["kind"] != SAME]
    return len(killed), len(killed) + len(survived)


def lines() -> Iterator[str]:
    """What became of how many, the share that laws kill, and the survivors one by one."""
    judged = rows()
    for outcome, count in Counter(row["outcome"] for row in judged).most_common():
        yield f"{count:4} {outcome}"
    killed, all_of_them = effective(judged)
    yield f"laws kill {killed} of {all_of_them} that compute something else: {killed / all_of_them:.1%}"
    for row in judged:
        if row["outcome"] == "survived":
            yield f"{row['kind']}: {row['fault']} ({row['says']}): {row['reason']}"
