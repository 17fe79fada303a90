"""What other tools say of the pairs: gloo, gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL, and torch's threaded group.

``python -m benchmarks communication`` runs what ``peers.jsonl`` lacks and counts what it has.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from benchmarks.communication import real
from benchmarks.communication.pairs import Pair, pairs
from benchmarks.communication.real import Outcome
from fsdpcheck.engines._real.forked import Said, Say

RECORD: Final = Path(__file__).with_name("peers.jsonl")
SECONDS: Final = 14.0
GROUP_SECONDS: Final = 8.0
"""After how long a group of gloo gives up, so that what it then says is heard."""
_CHARACTERS: Final = 1200
_GAVE_UP: Final = ("Timed out waiting", "imeout after", "failed to pass monitoredBarrier", "timed out after")


@dataclass(frozen=True)
class Peer:
    """A tool that runs a program: what it says of it, in its own words."""

    name: str
    run: Callable[[Pair, bool], Outcome]


def _gloo(pair: Pair, faulty: bool) -> Outcome:
    return _heard(real.run(pair, faulty, SECONDS, group_seconds=GROUP_SECONDS))


def _gloo_with_detail(pair: Pair, faulty: bool) -> Outcome:
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    return _heard(real.run(pair, faulty, SECONDS, detail, group_seconds=GROUP_SECONDS))


def _threaded(pair: Pair, faulty: bool) -> Outcome:
    """Every rank a thread of one process, as torch's MultiThreadedTestCase has them."""
    ranks = tuple(range(pair.world_size))
    return _heard(real.collected({ranks: lambda say: _on_threads(pair, faulty, say)}, SECONDS))


def _heard(outcome: Outcome) -> Outcome:
    """A verdict by the clock is a time-out, whoever's clock it was; the text has what was said at its end."""
    kind = "time-out" if outcome.kind == "raised" and any(at in outcome.text for at in _GAVE_UP) else outcome.kind
    return Outcome(kind, outcome.text[:_CHARACTERS], outcome.seconds)


def _on_threads(pair: Pair, faulty: bool, say: Say) -> None:
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, init, this_thread = dist.HashStore(), dist.init_process_group, threading.local()

    def joined(*_: Any, **__: Any) -> None:
        init("threaded", rank=this_thread.rank, world_size=pair.world_size, store=store)

    def run(rank: int) -> None:
        this_thread.rank = rank
        real.tell(rank, lambda: pair.run(faulty), told)

    def told(rank: int, said: Said) -> None:
        say(rank, said)
        if said.kind != "returned":
            multi_threaded_pg.ProcessLocalGroup.exception_handle(None)

    dist.init_process_group = joined
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(pair.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


PEERS: Final = (Peer("gloo", _gloo), Peer("gloo, DETAIL", _gloo_with_detail), Peer("threaded group", _threaded))


def _row(peer: Peer, pair: Pair, faulty: bool) -> dict[str, Any]:
    """What tells one run from another: a program that was edited is another one."""
    source = hashlib.sha256(inspect.getsource(pair.program).encode()).hexdigest()[:16]
    return {"peer": peer.name, "pair": pair.name, "faulty": faulty, "source": source}


def recorded() -> list[dict[str, Any]]:
    """Every run on record."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []


def run_what_lacks(minutes: float = 9.0) -> int:
    """Run pairs of which the record has nothing, for so long; the number of those that are left."""
    until = time.monotonic() + 60 * minutes
    keys = ("peer", "pair", "faulty", "source")
    known = {tuple(row[key] for key in keys) for row in recorded()}
    asked = [(peer, pair, faulty) for peer in PEERS for pair in pairs() for faulty in (False, True)]
    lacking = [run for run in asked if tuple(_row(*run).values()) not in known]
    with RECORD.open("a", encoding="utf-8") as record:
        for at, (peer, pair, faulty) in enumerate(lacking):
            if time.monotonic() > until:
                return len(lacking) - at
            outcome = peer.run(pair, faulty)
            said = {"kind": outcome.kind, "text": outcome.text, "seconds": outcome.seconds}
            record.write(json.dumps(_row(peer, pair, faulty) | said) + "\n")
            record.flush()
    return 0


def lines(minutes: float | str = 9.0) -> Iterator[str]:
    """What each peer said of faulty programs and of twins, by kind."""
    left = run_what_lacks(float(minutes))
    rows = recorded()
    for peer in PEERS:
        twins = {row["pair"]: row["text"] for row in rows if row["peer"] == peer.name and not row["faulty"]}
        for faulty in (True, False):
            said = [row for row in rows if row["peer"] == peer.name and row["faulty"] == faulty]
            kinds = Counter(row["kind"] for row in said)
            if faulty:
                kinds["completed, as the twin"] = sum(
                    row["kind"] == "completed" and row["text"] == twins[row["pair"]] for row in said
                )
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            yield f"{peer.name}, {'faulty' if faulty else 'twins'} ({len(said)}): {counts}"
    if left:
        yield f"{left} runs are left: say it again"
