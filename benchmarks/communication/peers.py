"""What other tools say of the pairs, in ``peers.jsonl``: which tools, how each runs a program, and what lacks.

gloo, gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's threaded group, LocalTensorMode, and on Flight-Recorder dumps of
real gloo ranks torch's analyser and fsdpcheck's.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.communication import dumps, local_tensors, real
from benchmarks.communication.pairs import Pair, pairs
from benchmarks.communication.real import Outcome
from fsdpcheck.engines._real import forks

RECORD: Final = Path(__file__).with_name("peers.jsonl")
SECONDS: Final = 14.0
GROUP_SECONDS: Final = 8.0
"""After how long a group of gloo gives up, so that what it then says is heard."""
GLOO: Final = "gloo"
DETAIL: Final = "gloo, DETAIL"
THREADED: Final = "threaded group"
IN_ONE_PROGRAM: Final = "LocalTensorMode"
_GAVE_UP: Final = ("Timed out waiting", "imeout after", "failed to pass monitoredBarrier", "timed out after")


Said = dict[str, Outcome]
"""What tools say of one run of a program, in their own words, by name of the tool."""


@dataclass(frozen=True)
class Way:
    """A way to run a program, and the names of the tools that say something of it."""

    names: tuple[str, ...]
    run: Callable[[Pair, bool], Said]


def _gloo(pair: Pair, faulty: bool) -> Said:
    return {GLOO: _heard(real.run(pair, faulty, SECONDS, group_seconds=GROUP_SECONDS))}


def _gloo_with_detail(pair: Pair, faulty: bool) -> Said:
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    return {DETAIL: _heard(real.run(pair, faulty, SECONDS, detail, group_seconds=GROUP_SECONDS))}


def _threaded(pair: Pair, faulty: bool) -> Said:
    """Every rank a thread of one process, as torch's MultiThreadedTestCase has them."""
    ranks = tuple(range(pair.world_size))
    return {THREADED: _heard(real.collected({ranks: lambda say: _on_threads(pair, faulty, say)}, SECONDS))}


def _in_one_program(pair: Pair, faulty: bool) -> Said:
    return {IN_ONE_PROGRAM: local_tensors.run(pair, faulty, SECONDS)}


def _heard(outcome: Outcome) -> Outcome:
    """A verdict by the clock is a time-out, whoever's clock it was; the text has what was said at its end."""
    gave_up = outcome.seconds >= GROUP_SECONDS and any(at in outcome.text for at in _GAVE_UP)
    kind = "time-out" if outcome.kind == "raised" and gave_up else outcome.kind
    return Outcome(kind, outcome.text, outcome.seconds)


def _on_threads(pair: Pair, faulty: bool, say: forks.Say) -> None:
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, init, this_thread = dist.HashStore(), dist.init_process_group, threading.local()

    def joined(*_: Any, **__: Any) -> None:
        init("threaded", rank=this_thread.rank, world_size=pair.world_size, store=store)

    def run(rank: int) -> None:
        this_thread.rank = rank
        real.tell(rank, lambda: pair.run(faulty), told)

    def told(rank: int, said: forks.Said) -> None:
        say(rank, said)
        if said.kind != "returned":
            multi_threaded_pg.ProcessLocalGroup.exception_handle(None)

    dist.init_process_group = joined
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(pair.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


WAYS: Final = (
    Way((GLOO,), _gloo),
    Way((DETAIL,), _gloo_with_detail),
    Way((THREADED,), _threaded),
    Way((IN_ONE_PROGRAM,), _in_one_program),
    Way(tuple(dumps.ANALYSERS), dumps.said),
)
PEERS: Final = tuple(name for way in WAYS for name in way.names)

CLOCKS: Final = {GLOO: GROUP_SECONDS, DETAIL: GROUP_SECONDS, THREADED: SECONDS, IN_ONE_PROGRAM: SECONDS}
"""Tool -> after how many seconds a faulty program that hangs is ended, by gloo or by the benchmark."""


def recorded() -> dict[tuple[str, str, bool], Outcome]:
    """What is on record of the programs as they are now, by (peer, pair, faulty); the last run of each counts."""
    rows = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []
    by_name = {pair.name: pair for pair in pairs()}
    return {
        (row["peer"], row["pair"], row["faulty"]): Outcome(row["kind"], row["text"], row["seconds"])
        for row in rows
        if row["pair"] in by_name and row["source"] == _source(by_name[row["pair"]])
    }


@cache
def _source(pair: Pair) -> str:
    """What tells a program from one that was edited."""
    return hashlib.sha256(inspect.getsource(pair.program).encode()).hexdigest()[:16]


def run_what_lacks(minutes: float, shard: tuple[int, int] = (1, 1)) -> int:
    """Run pairs of which the record has nothing, for so long; the number of those of the shard that are left.

    Shard K of N takes each N-th run; those of several processes go into one record.
    """
    until = time.monotonic() + 60 * minutes
    known = recorded().keys()
    runs = [(way, pair, faulty) for way in WAYS for pair in pairs() for faulty in (False, True)]
    here = runs[shard[0] - 1 :: shard[1]]
    lacking = [run for run in here if any((name, run[1].name, run[2]) not in known for name in run[0].names)]
    for at, (way, pair, faulty) in enumerate(lacking):
        if time.monotonic() > until:
            return len(lacking) - at
        for name, outcome in way.run(pair, faulty).items():
            key = {"peer": name, "pair": pair.name, "faulty": faulty, "source": _source(pair)}
            _record(key | {"kind": outcome.kind, "text": outcome.text, "seconds": outcome.seconds})
    return 0


def _record(row: dict[str, Any]) -> None:
    with RECORD.open("a", encoding="utf-8") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        record.write(json.dumps(row) + "\n")
