"""The tables of docs/communication.md, from what is on record: fsdpcheck now and at first, and its peers.

``python -m benchmarks communication [MINUTES] [--shard K/N]`` first runs what the record of the peers lacks, for
MINUTES (default 9); ``--status`` runs nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from benchmarks.communication import judged, peers
from benchmarks.communication.judged import Verdict
from benchmarks.communication.pairs import FROZEN, Pair, pairs
from benchmarks.communication.scores import RESULTS, Score, own_score, score

FIRST_RUNS: Final[Mapping[str, Path]] = {
    folder: Path(__file__).with_name(name)
    for folder, name in zip(FROZEN, ("first_run.jsonl", "first_run_later.jsonl"), strict=True)
}
"""Folder of frozen pairs -> what fsdpcheck said of them when it first ran them."""
OWN: Final = "fsdpcheck"
_COLUMNS: Final = (
    "judge", "named strictly", "line and ranks right", "said something", "only the clock", "only another result",
    "nothing", "cannot run it", "false alarms", "seconds",
)  # fmt: skip
_CLASS_COLUMNS: Final[Mapping[str, str]] = {
    OWN: OWN,
    peers.GLOO: "gloo",
    peers.DETAIL: "DETAIL",
    peers.THREADED: "threaded",
    peers.IN_ONE_PROGRAM: "LocalTensorMode",
    "torchfrtrace, groups filled in": "torchfrtrace",
    "fsdpcheck, groups filled in": "`trace check`",
}
"""Judge -> how the table by class calls it."""


@dataclass(frozen=True)
class Judge:
    """Who judges, and its score of each pair on record, by name of the pair."""

    name: str
    scores: Mapping[str, Score]


def own(record: Path, name: str = OWN) -> Judge:
    """fsdpcheck, by one of its records."""
    rows = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    known = {pair.name: pair for pair in pairs()}
    scores = {row["pair"]: own_score(known[row["pair"]], _verdict(row["found"]), _verdict(row["twin"])) for row in rows}
    return Judge(name, scores)


def _verdict(found: Mapping[str, Any]) -> Verdict:
    values = {field.name: found[field.name] for field in fields(Verdict)}
    return Verdict(**values | {"ranks": tuple(found["ranks"]), "lines": tuple(found["lines"])})


def proved() -> int:
    """How many twins fsdpcheck proved right for every order."""
    return sum(json.loads(line)["twin"]["proved"] for line in judged.RECORD.read_text(encoding="utf-8").splitlines())


def others() -> list[Judge]:
    """The peers."""
    rows = peers.recorded()
    return [
        Judge(
            name,
            {
                pair.name: score(pair, rows[name, pair.name, True], rows[name, pair.name, False])
                for pair in pairs()
                if {(name, pair.name, True), (name, pair.name, False)} <= rows.keys()
            },
        )
        for name in peers.PEERS
    ]


def judges(table: list[Judge], chosen: Collection[Pair]) -> Iterator[str]:
    """A row for each judge, of the pairs that are chosen."""
    names = {pair.name for pair in chosen}
    yield from _head(_COLUMNS)
    for judge in table:
        scores = [found for name, found in judge.scores.items() if name in names]
        results = Counter(found.result for found in scores)
        cells: list[object] = [judge.name, sum(found.strict for found in scores), sum(found.placed for found in scores)]
        cells += [results[result] for result in RESULTS]
        cells += [sum(found.alarm for found in scores), f"{sum(found.seconds for found in scores):.0f}"]
        yield _row(cells)


def classes(table: list[Judge]) -> Iterator[str]:
    """How many pairs of each class each judge names strictly."""
    by_name = {judge.name: judge for judge in table}
    yield from _head(("class", "pairs", *_CLASS_COLUMNS.values()))
    for class_ in sorted({pair.class_ for pair in pairs()}):
        names = [pair.name for pair in pairs() if pair.class_ == class_]
        strict = [sum(by_name[judge].scores[name].strict for name in names) for judge in _CLASS_COLUMNS]
        yield _row([class_, len(names), *(count or "-" for count in strict)])


def seconds_of_twins() -> Iterator[str]:
    """How long a correct program takes, beside the clock that ends a faulty one."""
    yield from _head(("run on", "twins", "median", "95 of 100", "longest", "ended after"))
    found = peers.recorded()
    for name, limit in peers.CLOCKS.items():
        seconds = sorted(
            outcome.seconds
            for (peer, _, faulty), outcome in found.items()
            if peer == name and not faulty and outcome.kind == "completed"
        )
        at = [seconds[len(seconds) // 2], seconds[len(seconds) * 95 // 100], seconds[-1], limit]
        yield _row([name, len(seconds), *(f"{one:.1f}" for one in at)])


def _head(columns: tuple[str, ...]) -> Iterator[str]:
    yield _row(list(columns))
    yield "|---" * len(columns) + "|"


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def lines(minutes: float | str = 9.0, shard: tuple[int, int] = (1, 1), status: bool = False) -> Iterator[str]:
    """Run what the record of the peers lacks, for so long, unless only the status is asked for; then the tables."""
    if not status and (left := peers.run_what_lacks(float(minutes), shard)):
        yield f"{left} runs are left: say it again"
        return
    yield from on_record()


def on_record() -> Iterator[str]:
    """All tables, each behind the sentence that says of what it is."""
    now, peers_now = own(judged.RECORD), others()
    yield f"All {len(pairs())} pairs; fsdpcheck proved {proved()} twins right for every order:"
    yield ""
    yield from judges([now, *peers_now], pairs())
    yield ""
    yield "Seconds that correct twins took where they ran to their end:"
    yield ""
    yield from seconds_of_twins()
    yield ""
    for folder, first_run in FIRST_RUNS.items():
        frozen = [pair for pair in pairs() if pair.frozen == folder]
        yield f"The {len(frozen)} pairs of `{folder}`:"
        yield ""
        yield from judges([own(first_run, f"{OWN}, first run"), now, *peers_now], frozen)
        yield ""
    yield f"Named strictly, by class ({len({pair.class_ for pair in pairs()})} classes):"
    yield ""
    yield from classes([now, *peers_now])
