"""``python -m benchmarks compared [GLOB]``: what ``fsdpcheck compare`` says of honest scripts, planted and public bugs.

Each row of benchmarks/compared/results.jsonl is one script on its numbers of ranks: what was said, at which
observable, for what cause, how finely, in how many seconds; and what ``torch.allclose`` with its defaults would have
said of the same runs. A row that is there is not run again; ``--shard K/N`` runs each N-th.
``--tables`` prints the tables of docs/compare.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.compared.bugs import BUGS
from benchmarks.compared.honest import HONEST
from benchmarks.compared.tables import lines as of_document
from benchmarks.revision import revision
from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.compare import compare
from fsdpcheck.comparison.kept_runs import Runs
from fsdpcheck.comparison.results import World
from fsdpcheck.comparison.runs import Run
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.report import comparison as report
from fsdpcheck.simulation.simulate import Options
from tests.public_bugs.table import PROGRAMS

RECORD: Final = Path(__file__).with_name("results.jsonl")
_PUBLIC: Final = Path(__file__).parents[2] / "tests" / "public_bugs"
_SEEDS: Final = (0, 1, 2)
_WATCHED: Final = ("gradient", "parameter")


@dataclass(frozen=True)
class Item:
    """``name``: of the row. ``text``: the script, where it is no file of ours. ``wanted``: "agrees" or "differs"."""

    name: str
    script: Path
    text: str
    line: str
    ranks: tuple[int, ...]
    wanted: str
    cause: str = ""


def items() -> list[Item]:
    """Honest scripts by seed, planted bugs and harmless changes, and public bugs in both forms.

    A bug is looked for on the largest number of ranks at which it shows.
    """
    honest = [
        Item(f"honest/{each.name}/{seed}", each.path, "", f"{each.line} --seed {seed}", each.ranks, "agrees")
        for each in HONEST
        for seed in _SEEDS
    ]
    planted = [
        Item(
            f"{'harmless' if bug.harmless else 'bug'}/{bug.name}",
            bug.honest.path,
            bug.text(),
            bug.honest.line,
            (bug.honest.ranks[0], max(bug.ranks or bug.honest.ranks)),
            "agrees" if bug.harmless else "fails" if bug.fails else "differs",
            bug.cause,
        )
        for bug in BUGS
    ]
    public = [
        Item(
            f"public/{each.name}/{form}",
            _PUBLIC / f"{each.name}.py",
            "",
            f"{each.template} --form {form}",
            (each.ranks[0], *each.shown) if form == "faulty" else each.ranks,
            "differs" if form == "faulty" else "agrees",
            each.category,
        )
        for each in PROGRAMS
        for form in ("faulty", "correct")
    ]
    return [*honest, *planted, *public]


def lines(
    glob: str = "*", *, shard: tuple[int, int] = (1, 1), status: bool = False, tables: bool = False
) -> Iterator[str]:
    """Each row as it is there, then the counts."""
    done = recorded()
    if tables:
        yield from of_document(done.values())
        return
    part, parts = shard
    if not status:
        for number, item in enumerate(items()):
            if number % parts == part - 1 and fnmatch(item.name, glob) and item.name not in done:
                row = judged(item)
                with RECORD.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                done[item.name] = row
                yield f"{'right' if is_right(row) else 'WRONG'} {item.name}: {_words(row)}, {row['seconds']:.0f} s"
    yield from counts(done)


def recorded() -> dict[str, dict[str, Any]]:
    """The rows that are there, by name."""
    rows = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    return {row["name"]: row for row in map(json.loads, rows)}


def judged(item: Item) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        script = item.script
        if item.text:
            script = Path(folder) / item.script.name
            script.write_text(item.text, encoding="utf-8")
        line = read(f"{script} {item.line}")
        runs, began = Runs(line, Options(show=False), item.ranks[0]), time.process_time() + _of_children()
        row: dict[str, Any] = {"name": item.name, "wanted": item.wanted, "cause": item.cause, "ranks": list(item.ranks)}
        row["commit"] = revision()
        try:
            found = compare(line, item.ranks, Options(show=False), runs=runs)
        except FsdpcheckError as error:
            return row | {"says": "error", "why": str(error), "worlds": [], "seconds": _since(began), "allclose": {}}
        worlds = [_world(world) for world in found.worlds]
        said = {"says": found.says, "why": found.why, "runs": found.runs, "observables": _most(found.worlds)}
        return row | said | {"worlds": worlds, "seconds": _since(began), "allclose": allclose(runs, item.ranks)}


def _since(began: float) -> float:
    return round(time.process_time() + _of_children() - began, 1)


def _of_children() -> float:
    import resource

    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _most(worlds: tuple[World, ...]) -> int:
    return max((world.observables for world in worlds), default=0)


def _world(world: World) -> dict[str, Any]:
    first = world.first
    return {
        "ranks": world.size,
        "says": world.says,
        "named": report.category(world),
        "first": "" if first is None else str(first.key),
        "relative": None if first is None or not first.size else first.apart / first.size,
        "fact": "" if world.fact is None else world.fact.text,
        "causes": [cause.text for cause in world.causes],
        "failure": "" if world.failure is None else world.failure.text.splitlines()[0],
        "undecidable": len(world.undecidable),
        "precision": "" if world.precision is None else str(world.precision.key),
        "resolution": world.resolution,
    }


def allclose(runs: Runs, ranks: tuple[int, ...]) -> dict[str, int]:
    """By number of ranks, how many gradients and parameters ``torch.allclose`` calls different, in own precision."""
    base = Run(ranks[0])
    wrong: dict[str, int] = {}
    for size in ranks[1:]:
        if not {base, Run(size)} <= runs.done.keys() or any(runs.done[run].failure for run in (base, Run(size))):
            continue
        one, other = runs.values(base), runs.values(Run(size))
        keys = [key for key in one if key.kind in _WATCHED]
        wrong[str(size)] = sum(key not in other or not _close(one[key], other[key]) for key in keys)
    return wrong


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(other, one)


def is_right(row: dict[str, Any]) -> bool:
    """Whether it says what was wanted. "Precision only" is a warning of what agrees, and right where it was planted."""
    if row["cause"] == "precision only":
        return any(world["precision"] for world in row["worlds"]) or bool(row["says"] == "differs")
    if row["wanted"] == "fails":
        return bool(row["says"] in ("fails", "differs"))
    return bool(row["says"] == row["wanted"])


def is_named(cause: str, world: dict[str, Any]) -> bool:
    """Whether what was said is what was planted: a small error is one in one rank's part, and "other" has no name."""
    said = {"small error": "one rank", "other": world["first"].partition(" ")[0]}.get(cause, cause)
    return bool(world["named"] == said)


def _words(row: dict[str, Any]) -> str:
    worlds = [world for world in row["worlds"] if world["says"] != "agrees"]
    told = "; ".join(
        f"{world['ranks']} ranks: {world['fact'] or world['first'] or world['failure']} ({world['named']})"
        for world in worlds
    )
    return f"{row['says']}{' ' + row['why'].splitlines()[0] if row['why'] else ''}{': ' + told if told else ''}"


def counts(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each set of scripts."""
    for kind in ("honest", "harmless", "bug", "public"):
        mine = [row for name, row in rows.items() if name.startswith(f"{kind}/")]
        if not mine:
            continue
        worlds = [world for row in mine for world in row["worlds"]]
        right = sum(map(is_right, mine))
        accused = sum(many > 0 for row in mine for many in row["allclose"].values())
        yield (
            f"{kind:<9}{right} of {len(mine)} right; worlds: "
            + ", ".join(
                f"{sum(w['says'] == says for w in worlds)} {says}"
                for says in ("agrees", "differs", "fails", "undecidable")
            )
            + f"; allclose calls {accused} of {sum(len(row['allclose']) for row in mine)} worlds different"
        )
        faulty = [row for row in mine if row["wanted"] == "differs" and row["says"] == "differs"]
        if kind == "bug" and faulty:
            named = sum(any(is_named(row["cause"], world) for world in row["worlds"]) for row in faulty)
            yield f"{'':<9}cause named as planted: {named} of {len(faulty)} found"
    total = sum(row["seconds"] for row in rows.values())
    if rows:
        yield f"{len(rows)} rows, {total / len(rows):.1f} s of processor time a comparison"
