"""Thirty public scripts, unmodified: on simulated ranks, and in real processes over gloo.

The list (public_scripts.json) was made before the first of them was run; the scripts themselves are no part of this
repository, and lie in a folder OWNER/NAME each. docs/scripts.md says what came of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import printed
from benchmarks.script_runs import Ran, in_processes, on_simulated_ranks

HERE: Final = Path(__file__).parent
LIST: Final = HERE / "public_scripts.json"
RESULTS: Final = HERE / "public_scripts.jsonl"


def lines(*names: str, folder: str = "") -> Iterator[str]:
    """[NAME ...] --in DIR: each script on simulated ranks and in processes, into public_scripts.jsonl; then a table."""
    if not folder:
        raise SystemExit("python -m benchmarks scripts --in DIR: where the repositories lie, DIR/OWNER/NAME")
    for row in _listed():
        if names and row["name"] not in names:
            continue
        yield f"{row['name']}: {row['line']}"
        found = _result(row, on_simulated_ranks(row, Path(folder)), in_processes(row, Path(folder)))
        _keep(found)
        yield "  " + _told(found)
    yield from table()


def table() -> Iterator[str]:
    """The newest result of each script, in the order of the list, and how many run."""
    rows = list(_kept().values())
    places = {row["name"]: row["repository"] for row in _listed()}
    yield "| script | repository | ranks | simulated | s | processes | s | equal lines |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        one, other = row["simulated"], row["real"]
        yield (
            f"| {row['name']} | {places[row['name']]} | {row['ranks']} | {one['outcome']} | {one['seconds']} "
            f"| {other['outcome']} | {other['seconds']} | {row['equal']} |"
        )
    here = [row for row in rows if row["simulated"]["outcome"] == "runs"]
    both = [row for row in here if row["real"]["outcome"] == "runs"]
    equal = sum(len(set(row["equal"].split(" of "))) == 1 for row in both)
    yield (
        f"{len(here)} of {len(rows)} run on simulated ranks; of the {len(both)} that run in processes too, "
        f"{equal} print equal lines"
    )


def _kept() -> dict[str, dict[str, Any]]:
    """Results by name, in the order of the list."""
    newest = {found["name"]: found for found in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())}
    return {row["name"]: newest[row["name"]] for row in _listed() if row["name"] in newest}


def _listed() -> list[dict[str, Any]]:
    scripts: list[dict[str, Any]] = json.loads(LIST.read_text(encoding="utf-8"))["scripts"]
    return scripts


def _keep(found: dict[str, Any]) -> None:
    """In the place of the result that is there of this script, if one is."""
    with RESULTS.open("a", encoding="utf-8") as out:
        out.write(json.dumps(found) + "\n")
    RESULTS.write_text("".join(json.dumps(each) + "\n" for each in _kept().values()), encoding="utf-8")


def _result(row: dict[str, Any], simulated: Ran, real: Ran) -> dict[str, Any]:
    same, all_lines = printed.equal_lines(simulated.printed, real.printed)
    equal = f"{same} of {all_lines}"
    if simulated.code and real.code and (error := printed.error(simulated.ending)):
        equal = f"{'the same' if error in real.printed else 'another'} error"
    return {
        "name": row["name"],
        "ranks": row["ranks"],
        "simulated": {
            "outcome": _outcome(simulated),
            "seconds": round(simulated.seconds, 1),
            "ending": simulated.ending,
        },
        "real": {"outcome": _outcome(real), "seconds": round(real.seconds, 1), "ending": real.ending},
        "equal": equal,
        "differ": printed.differing(simulated.printed, real.printed) if "of" in equal else [],
    }


def _outcome(ran: Ran) -> str:
    if ran.code is None:
        return "given up"
    return "runs" if ran.code == 0 else f"code {ran.code}"


def _told(found: dict[str, Any]) -> str:
    one, other = found["simulated"], found["real"]
    sides = (
        f"{name}: {side['outcome']} {side['seconds']} s" for name, side in (("simulated", one), ("processes", other))
    )
    return f"{'; '.join(sides)}; equal: {found['equal']}"
