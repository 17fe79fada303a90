"""What came of tests: lines of a file, one for each test, kind of ranks and number of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("simulated", "gloo", "threaded")
STATUSES = ("passed", "failed", "killed", "skipped")
KNOWN = Path(__file__).with_name("known.json")
RECORD = Path(__file__).with_name("wheel.jsonl")
"""The tests of torch's wheel, as they were last run whole; docs/torch-suite.md says when."""


@dataclass(frozen=True)
class Outcome:
    """``status``: passed, failed, skipped, or killed (it crashed, or did not end). ``reason``: its first line."""

    status: str
    reason: str = ""


@dataclass(frozen=True)
class Line:
    """One test on ``size`` ranks of one kind; ``processor`` and ``wall`` are seconds, of all its processes."""

    test: str
    kind: str
    size: int
    status: str
    reason: str
    processor: float
    wall: float


def append(file: Path, line: Line) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(line)) + "\n")


def read(file: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    return [Line(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def known() -> dict[str, str]:
    """By test, why it passes on real ranks and not on simulated ones."""
    table: dict[str, str] = json.loads(KNOWN.read_text())
    return table


def differences(lines: Iterable[Line]) -> dict[str, str]:
    """By test, what simulated ranks say where processes pass."""
    found = {}
    for test, kinds in _by_test(lines).items():
        ours, theirs = kinds.get("simulated"), kinds.get("gloo")
        if ours and theirs and theirs.status == "passed" and ours.status != "passed":
            found[test] = f"{ours.status}: {ours.reason}"
    return found


def passing(lines: Iterable[Line]) -> set[str]:
    """Tests that pass on simulated ranks."""
    return {test for test, kinds in _by_test(lines).items() if _passed(kinds, "simulated")}


def table(lines: Iterable[Line]) -> str:
    """Counts by kind, seconds where both pass, and the differences with their reasons."""
    tests, reasons = _by_test(lines), known()
    rows = [" " * 12 + "".join(f"{status:>8}" for status in STATUSES)]
    for kind in KINDS:
        of_kind = [kinds[kind].status for kinds in tests.values() if kind in kinds]
        rows.append(f"{kind:<12}" + "".join(f"{of_kind.count(status):>8}" for status in STATUSES))
    both = [kinds for kinds in tests.values() if all(_passed(kinds, kind) for kind in ("simulated", "gloo"))]
    for kind in ("simulated", "gloo"):
        processor, wall = (sum(getattr(kinds[kind], unit) for kinds in both) for unit in ("processor", "wall"))
        rows.append(f"{len(both)} that pass on both, {kind}: {processor:.1f} processor seconds, {wall:.1f} s")
    for test, said in differences(lines).items():
        rows.append(f"{test}: {said}\n    {reasons.get(test, 'NOT KNOWN')}")
    return "\n".join(rows)


def markdown(lines: Iterable[Line]) -> str:
    """The tables of docs/torch-suite.md: counts, what gloo alone passes with its reason, and what it alone does not."""
    tests, reasons = _by_test(lines), known()
    rows = ["| ranks | " + " | ".join(STATUSES) + " |", "|---" * (1 + len(STATUSES)) + "|"]
    for kind in KINDS:
        of_kind = [kinds[kind].status for kinds in tests.values() if kind in kinds]
        rows.append(f"| {kind} | " + " | ".join(str(of_kind.count(status)) for status in STATUSES) + " |")
    rows += ["", "| passes on gloo and not on simulated ranks | reason |", "|---|---|"]
    rows += [f"| {test} | {reasons.get(test, 'NOT KNOWN')} |" for test in differences(lines)]
    rows += ["", "| passes on simulated ranks and not on gloo | what gloo says |", "|---|---|"]
    rows += [f"| {test} | {kinds['gloo'].reason} |" for test, kinds in tests.items() if _alone(kinds)]
    rows += ["", "| fails on both | what simulated ranks say | what gloo says |", "|---|---|---|"]
    for test, kinds in tests.items():
        ours, theirs = kinds["simulated"], kinds["gloo"]
        if {ours.status, theirs.status} <= {"failed", "killed"}:
            rows.append(f"| {test} | {ours.reason} | {theirs.reason} |")
    return "\n".join(rows)


def _alone(kinds: dict[str, Line]) -> bool:
    return _passed(kinds, "simulated") and not _passed(kinds, "gloo")


def _passed(kinds: dict[str, Line], kind: str) -> bool:
    return kind in kinds and kinds[kind].status == "passed"


def _by_test(lines: Iterable[Line]) -> dict[str, dict[str, Line]]:
    """By name of test and number of ranks, its line of each kind."""
    found: dict[str, dict[str, Line]] = defaultdict(dict)
    for line in lines:
        found[f"{line.test} on {line.size}"][line.kind] = line
    return dict(sorted(found.items()))
