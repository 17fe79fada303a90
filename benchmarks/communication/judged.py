"""What fsdpcheck says of the pairs: the kind of its finding, the ranks and the lines that it names.

``python -m benchmarks communication_judged [GLOB]`` runs each pair in a process of its own and counts strictly: a
finding is right if its kind is expected, a line marked ``# here`` is named, and every rank at fault is.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.communication.pairs import Pair, pairs, without_prefixes
from fsdpcheck.simulation.search import search

RECORD: Final = Path(__file__).with_name("judged.jsonl")
_FORK: Final = multiprocessing.get_context("fork")
_KINDS: Final = {"never waited for": "never waited"}
_MOST: Final = 200


@dataclass(frozen=True)
class Verdict:
    """``kind``: "" for no finding. ``lines``: of the program's file, that the finding names."""

    kind: str
    ranks: tuple[int, ...]
    lines: tuple[int, ...]
    text: str
    schedules: int
    proved: bool
    seconds: float

    def is_right(self, pair: Pair) -> bool:
        """Whether it is what was expected of the faulty program, strictly."""
        return pair.is_named_by({self.kind}, self.ranks, self.lines)


def judge(pair: Pair, faulty: bool) -> Verdict:
    """The verdict on one of the two programs, in a forked process: some end theirs."""
    here, there = _FORK.Pipe(duplex=False)
    began = time.monotonic()
    child = _FORK.Process(target=_answer, args=(pair, faulty, there))
    child.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {"kind": "lost", "text": "the process of the ranks was lost", "ranks": [], "schedules": 1}
    child.join()
    text = without_prefixes(str(found["text"]))
    return Verdict(
        _KINDS.get(found["kind"], found["kind"]),
        tuple(sorted(ranks_in(text) | set(found["ranks"]))),
        tuple(sorted(pair.lines_in(text))),
        text,
        found["schedules"],
        found.get("proved", False),
        round(time.monotonic() - began, 3),
    )


def ranks_in(text: str) -> set[int]:
    """The ranks that a report of fsdpcheck names."""
    return {number for part in re.findall(r"ranks? ([\d, -]+)", text) for number in _numbers(part)}


def _numbers(text: str) -> Iterator[int]:
    """The numbers of "0, 2-4"."""
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.strip().isdecimal():
            yield from range(int(first), int(last if last.strip().isdecimal() else first) + 1)


def _answer(pair: Pair, faulty: bool, there: Connection) -> None:
    found = search(pair.run, pair.world_size, (faulty,), most=_MOST)
    done = found.simulation
    failure = done.failure
    answer = {"schedules": found.schedules, "proved": found.proved, "ranks": [], "kind": "", "text": ""}
    if failure is not None:
        places = [f"rank {state.rank} at {state.where}" for state in failure.ranks if state.where]
        answer |= {"kind": failure.kind, "text": "\n".join([failure.text, *places, *found.order])}
        answer["ranks"] = sorted({state.rank for state in failure.ranks if state.where})
    elif any(note.startswith("leak") for note in done.notes):
        answer |= {"kind": "leak", "text": "\n".join(done.notes)}
    elif done.out_of_order:
        answer |= {"kind": "unsafe", "text": "\n".join(map(str, done.out_of_order))}
    there.send(answer)


def lines(glob: str = "*") -> Iterator[str]:
    """What is missed and what is a false alarm, pair by pair, then the counts.

    ``open``, ``frozen``, ``frozen_later`` in place of a glob: those pairs.

    What is said of all pairs is written down, in ``judged.jsonl``.
    """
    chosen = [pair for pair in pairs() if fnmatch(pair.name, glob) or glob == (pair.frozen or "open")]
    right = alarms = 0
    seconds = 0.0
    record = []
    for pair in chosen:
        found, twin = judge(pair, True), judge(pair, False)
        record.append({"pair": pair.name, "frozen": bool(pair.frozen), "found": asdict(found), "twin": asdict(twin)})
        seconds += found.seconds + twin.seconds
        if found.is_right(pair):
            right += 1
        else:
            got = f"{found.kind or 'nothing'} {found.ranks} {found.lines}"
            yield f"missed {pair.name} ({pair.class_}): got {got}, wanted {pair.expected} {pair.lines}"
        if twin.kind:
            alarms += 1
            yield f"false alarm {pair.name} ({pair.class_}): {twin.kind}: {twin.text[:300]}"
    if len(chosen) == len(pairs()):
        RECORD.write_text("".join(json.dumps(row) + "\n" for row in record), encoding="utf-8")
    proved = sum(bool(row["twin"]["proved"]) for row in record)  # type: ignore[index]
    yield (
        f"{right} of {len(chosen)} faulty programs named strictly, {alarms} false alarms on twins, of which {proved} "
        f"were proved right for every order; {seconds:.0f} s"
    )
