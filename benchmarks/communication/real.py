"""A pair on real processes: W forked ranks on the loopback, their store in the parent, as torchrun has it.

What programs import is imported before the fork, so that time is the ranks' own.
``python -m benchmarks.communication.real [GLOB] [--faulty] [--seconds N]`` prints what came of each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatch
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch.distributed import distributed_c10d

from benchmarks.communication.pairs import Pair, pairs

JOIN: Final = timedelta(seconds=60)
GRACE_SECONDS: Final = 2.0
"""How long the other ranks may go on when one has raised, before they are ended, as torchrun ends them."""

_FORK: Final = multiprocessing.get_context("fork")

Say = Callable[[int, str, str], None]
"""Tells the parent what became of a rank: the rank, a kind and a text."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run: "completed" with what ranks returned, "raised", "ended", or "time-out", which names nothing.

    "ended": a process ended without returning or raising.
    """

    kind: str
    text: str
    seconds: float


def run(
    pair: Pair,
    faulty: bool,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    group_seconds: float | None = None,
) -> Outcome:
    """Run every rank as a process of its own on gloo; one that is not at its end after ``seconds`` is ended.

    ``group_seconds``: after how long gloo's own groups and stores give up, which is half an hour without it.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": str(pair.world_size)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}

    def program(rank: int, say: Say) -> None:
        os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(environment or {}))
        dist.set_debug_level_from_env()
        if group_seconds is not None:
            distributed_c10d.default_pg_timeout = timedelta(seconds=group_seconds)
        _meet_after_joining()
        tell(rank, lambda: pair.run(faulty), say)

    return collected({(rank,): lambda say, rank=rank: program(rank, say) for rank in range(pair.world_size)}, seconds)


def _meet_after_joining() -> None:
    """Have no rank leave before all are connected: gloo fails to join a rank that is gone, which no pair is about."""
    init = dist.init_process_group

    def joined(*args: Any, **options: Any) -> None:
        init(*args, **options)
        group = distributed_c10d._get_default_group()
        store = distributed_c10d._get_default_store()
        distributed_c10d._store_based_barrier(group.rank(), store, "joined", group.size(), JOIN)

    dist.init_process_group = joined


def tell(rank: int, program: Callable[[], object], say: Say) -> None:
    """Run a rank's program and say how it ended."""
    try:
        returned = program()
    except SystemExit as error:
        say(rank, "ended", f"SystemExit({error.code!r})")
    except BaseException as error:
        say(rank, "raised", f"{type(error).__name__}: {error}")
    else:
        say(rank, "returned", repr(returned))


def collected(programs: Mapping[tuple[int, ...], Callable[[Say], None]], seconds: float) -> Outcome:
    """Fork a process for the ranks of each program, and say what came of all together."""
    started, said = time.monotonic(), dict[int, tuple[str, str]]()
    deadline = started + seconds
    with _forked(programs) as open_pipes:
        while open_pipes and time.monotonic() < deadline:
            for pipe in wait(list(open_pipes), max(0.0, deadline - time.monotonic())):
                ranks, process = open_pipes[pipe]
                try:
                    rank, kind, text = pipe.recv()
                    said[rank] = kind, text
                except EOFError:
                    said |= {rank: ("ended", _end(process)) for rank in ranks if rank not in said}
                    del open_pipes[pipe]
            if any(_failed(*what) for what in said.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return _together(said, sum(map(len, programs)), time.monotonic() - started)


@contextmanager
def _forked(
    programs: Mapping[tuple[int, ...], Callable[[Say], None]],
) -> Iterator[dict[Connection, tuple[tuple[int, ...], BaseProcess]]]:
    """A pipe from each process, with its ranks."""
    pipes = {}
    processes: list[BaseProcess] = []
    for ranks, program in programs.items():
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_child, args=(program, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = ranks, process
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _child(program: Callable[[Say], None], pipe: Connection) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)
    program(lambda rank, kind, text: pipe.send((rank, kind, text)))
    os._exit(0)


def _end(process: BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _failed(kind: str, text: str) -> bool:
    """Whether torchrun would end the other ranks for it."""
    return kind == "raised" or (kind == "ended" and text not in ("exit code 0", "SystemExit(0)", "SystemExit(None)"))


def _together(said: Mapping[int, tuple[str, str]], world_size: int, seconds: float) -> Outcome:
    kinds = {kind for kind, _ in said.values()}
    lines = [f"rank {rank}: {kind}: {text}" for rank, (kind, text) in sorted(said.items()) if kind != "returned"]
    seconds = round(seconds, 2)
    if any(_failed(*what) for what in said.values()):
        return Outcome("raised" if "raised" in kinds else "ended", "\n".join(lines), seconds)
    if len(said) < world_size:
        silent = sorted(set(range(world_size)) - set(said))
        return Outcome("time-out", "\n".join([*lines, f"ranks {silent} not at their end"]), seconds)
    if "ended" in kinds:
        return Outcome("ended", "\n".join(lines), seconds)
    return Outcome("completed", "; ".join(text for _, (_, text) in sorted(said.items())), seconds)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("glob", nargs="?", default="*")
    parser.add_argument("--faulty", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    for pair in pairs():
        if fnmatch(pair.name, asked.glob) or fnmatch(pair.class_, asked.glob):
            outcome = run(pair, asked.faulty, asked.seconds)
            print(f"{pair.class_}: {pair.name}: {outcome.kind} ({outcome.seconds} s) {outcome.text}", flush=True)


if __name__ == "__main__":
    main()
