"""How the end of each kind of slice is read."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

from benchmarks import sessions as misbehaving
from benchmarks import soak as soaking
from benchmarks.night.slices import Outcome, Slice

_AGREE: Final = re.compile(r"(\d+) of (\d+) cases agree")


def tests(folder: Path, output: str, asked: Slice) -> Outcome:
    """A test that failed is a finding, and so is one that was asked for and did not run."""
    rows = _rows(folder)
    ended = Counter(row["outcome"] for row in rows)
    failed = [row["id"] for row in rows if row["outcome"] == "failed"]
    missing = [f"did not run: {name}" for name in asked.items if name not in {row["id"] for row in rows}]
    seconds = {row["id"]: row["seconds"] for row in rows}
    lost = len(failed) + len(missing)
    judged = {row["id"]: row["cases"] for row in rows if "cases" in row}
    return Outcome(ended["passed"], lost, ended["skipped"], sum(judged.values()), (*failed, *missing), seconds, judged)


def laws(folder: Path, output: str, asked: Slice) -> Outcome:
    """The verdicts of the report, one an item; what does not hold is a finding, with its token where it has one."""
    verdicts = json.loads((folder / "report.json").read_text(encoding="utf-8"))["verdicts"]
    wrong = [_told(verdict) for verdict in verdicts if verdict["status"] != "holds"]
    judged = {verdict["law"]: verdict["seconds"] for verdict in verdicts}
    seconds = {item: judged[law] for item in asked.items if (law := item.rpartition(" ")[2]) in judged}
    missing = [f"no verdict: {item}" for item in asked.items if item not in seconds]
    cases, holding = sum(verdict["cases"] for verdict in verdicts), len(verdicts) - len(wrong)
    return Outcome(holding, len(wrong) + len(missing), 0, cases, (*wrong, *missing), seconds)


def soak(folder: Path, output: str, asked: Slice) -> Outcome:
    """A pair of law and seed that alarms is a finding; one with too few cases counts as skipped."""
    rows = _rows(folder)
    holding = sum(row["status"] == "holds" for row in rows)
    wrong = tuple(f"{_told(row)} seed {row['seed']}" for row in rows if soaking.alarms(row))
    return Outcome(holding, len(wrong), len(rows) - holding - len(wrong), sum(row["cases"] for row in rows), wrong)


def sessions(folder: Path, output: str, asked: Slice) -> Outcome:
    """A session that did not end, left something or was green in error is a finding."""
    rows = _rows(folder)
    said = [(row, misbehaving.wrong(row)) for row in rows]
    wrong = tuple(f"{row['what']} {row['way']}: {words}" for row, words in said if words)
    return Outcome(len(rows) - len(wrong), len(wrong), findings=wrong)


def study(folder: Path, output: str, asked: Slice) -> Outcome:
    """A study that ran through has passed, unless runs that must agree do not."""
    agree = _AGREE.search(output)
    if agree is None:
        return Outcome(passed=1)
    same, cases = map(int, agree.groups())
    wrong = () if same == cases else (f"{agree[0]}: ...{output[-500:]}",)
    return Outcome(int(not wrong), len(wrong), 0, cases, wrong)


def _rows(folder: Path) -> list[dict[str, Any]]:
    """What the slice kept; a slice that kept nothing is no pass."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    if not rows:
        raise ValueError("nothing was kept in rows.jsonl")
    return rows


def _told(row: dict[str, Any]) -> str:
    token = (row.get("finding") or row).get("token", "")
    return " ".join(filter(None, (row["adapter"], row["law"], row["status"], row.get("reason", "")[:300], token)))
