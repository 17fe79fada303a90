"""A session on the ranks of torchrun: rank 0 draws, judges and reports; the others serve, and leave with its code."""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from fsdpcheck.engines import torchrun
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import UsageError, explain, writing
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.worker import Interrupt, fork_servers_of, told_session

_SCHEMA: Final = 1
"""Version of a rank's file."""


_to_write: list[_RankFile] = []
"""The file of rank 0, until it leaves."""


@functools.cache
def ranks() -> torchrun.Ranks:
    """The ranks of torchrun, of which this process is one. What is forked for workers has to be forked before."""
    return torchrun.Ranks()


def session(plan: Plan, listen: Callable[[Ledger, Mapping[str, Any]], None], files: Path | None = None) -> Ledger:
    """In rank 0: run ``plan`` on torchrun's ranks, at most. SIGTERM ends it as Ctrl-C does, with what was found.

    Behind it this process heeds neither, for what was found is reported then.

    ``files``: a folder for a file of each rank, or None. Raises UsageError.
    """
    plan = _fitted(plan)
    interrupt = Interrupt(signal.SIGINT, signal.SIGTERM)
    with interrupt.deferred():
        fork_servers_of(plan.adapters)
    own, ledger = _RankFile(files), Ledger(plan)
    _to_write.append(own)
    engine = ranks().engine(plan.budget, metal.of(plan.engine))

    def emit(event: dict[str, Any]) -> None:
        ledger.take(event)
        listen(ledger, event)
        if event["event"] == "plan":
            note = {"event": "note", "text": where_it_runs(metal.of(plan.engine))}
            ledger.take(note)
            listen(ledger, note)
        interrupt.again()

    last: dict[str, Any] = {"event": "end", "interrupted": True}
    try:
        with suppress(KeyboardInterrupt):  # once, of a signal that came when a rank was found to be gone already
            last = told_session(plan, emit, engine=engine)
            torchrun.no_more_signals()
        for text in _why_over() if last["interrupted"] else ():
            ledger.take({"event": "note", "text": text})
        ledger.take(last)
        listen(ledger, last)
    finally:
        engine.close()
        own.used = engine.processor_seconds
    return ledger


def serve(adapters: Iterable[str], files: Path | None = None) -> NoReturn:
    """In every other rank: serve until rank 0 leaves, and leave with its code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when
        signal.signal(number, signal.SIG_IGN)
    fork_servers_of(adapters)
    own, trouble = None, ""
    try:
        own = _RankFile(files)
    except UsageError as error:
        trouble = str(error)
    here = ranks()
    here.come(trouble)
    code = here.serve()
    if why := here.served.lost:
        print(f"fsdpcheck: rank {torchrun.rank()} on {here.hello.host} ends: {why}", file=sys.stderr)
    if own is not None:
        own.served = {"workers": here.served.workers, "replies": here.served.replies, "ends": here.served.ends}
        own.used = here.served.processor_seconds
        own.close(code)
    torchrun.no_more_signals()
    raise SystemExit(code)


def leave(code: int) -> None:
    """In rank 0: have the others leave with ``code`` too, and write the file of this rank."""
    while _to_write:
        _to_write.pop().close(code)
    with suppress(RuntimeError, ValueError, UsageError):  # nobody is there to be told
        ranks().leave(code)
    torchrun.no_more_signals()


def where_it_runs(on: metal.Metal) -> str:
    """The ranks in words: how many, on how many nodes, on what, over what."""
    known = ranks().known
    nodes, gpus = len({one.node for one in known}), max(one.gpus for one in known)
    over = on.words if on.device == "cuda" else "gloo on the processors"
    text = f"ranks: {len(known)} of torchrun on {nodes} node{'s' * (nodes > 1)}, {over}"
    unused = bool(gpus) and on.device == "cpu"
    return text + f"; {gpus} GPUs of a node are not used, and NCCL is not checked: --device cuda" * unused


def _why_over() -> Iterator[str]:
    """In rank 0: which processes of torchrun are gone, or without contact, so that the session cannot go on."""
    known, contact = ranks().known, ranks().contact
    if contact is None:
        return
    if contact.is_torchrun_gone():
        yield "torchrun is gone: its store, with the agent that started rank 0, answers no more"
        return
    if gone := contact.gone():
        yield f"torchrun ended the job: its process of {_named(gone)} is gone"
    lost: dict[tuple[str, str], list[int]] = {}
    for rank, why in sorted(contact.lost().items()):
        lost.setdefault((known[rank].host, why), []).append(rank)
    for (host, why), who in lost.items():
        yield (
            f"lost contact with {_named(who)} on {host}: {why}. What was found before stands; of the case that was"
            f" under way nothing is said. Next: see whether {host} runs and reaches {known[0].host}, and start again"
        )


def _named(who: Sequence[int]) -> str:
    return f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"


def _fitted(plan: Plan) -> Plan:
    """The plan on at most as many ranks as there are; on all of them in most cases, where nobody says on how many.

    Raises UsageError where more were asked for.
    """
    most = torchrun.world_size()
    given = tuple(size for size in plan.world_sizes if size > most)
    if given:
        what, then = "--world-size asks for more ranks than torchrun started", "choose another --nproc-per-node"
        raise UsageError(explain(what, got=", ".join(map(str, given)), wanted=f"at most {most}", then=then))
    fewer = sorted({1, 2, most // 2, most} - {0, most})
    sizes = plan.world_sizes or (*(size for size in fewer if size < most), *(most,) * max(1, len(fewer)))
    return replace(plan, world_sizes=sizes)


class _RankFile:
    """What this rank did, as JSON in a file of its own: written when it leaves; until then it has no exit code."""

    def __init__(self, folder: Path | None) -> None:
        """Raises UsageError where it cannot be written, in rank 0; another rank tells rank 0 (Hello.trouble)."""
        self._path = None if folder is None else folder / f"rank{torchrun.rank()}.json"
        self.served: dict[str, Any] = {}
        self.used = 0.0
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._write({"schema": _SCHEMA, "rank": torchrun.rank(), "exit_code": None})
            except OSError as error:
                what, then = f"--rank-files {folder}: cannot be written", "name a folder that can be written"
                raise UsageError(explain(what, got=error.strerror, then=then)) from error

    def close(self, code: int) -> None:
        """Write it."""
        if self._path is None:
            return
        own = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        data = {
            "schema": _SCHEMA,
            **asdict(ranks().hello),
            **self.served,
            "processor_seconds": {"this process": round(own, 2), "workers": round(self.used, 2)},
            "exit_code": code,
        }
        with suppress(OSError):
            self._write(data)

    def _write(self, data: Mapping[str, Any]) -> None:
        assert self._path is not None
        writing.whole(self._path, json.dumps(data, indent=1) + "\n")
