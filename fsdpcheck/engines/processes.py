"""Real ranks: W persistent gloo worker processes on loopback, fed requests over pipes.

Nothing in the data path knows of a hang: the driver proves it from the table where ranks publish (see _table.py), in
milliseconds. A worker that dies is a failure of the run, known from the operating system; its pool is replaced.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

from fsdpcheck import adapters, deadlock
from fsdpcheck.engines import _installs, _stacks, _table
from fsdpcheck.engines._follower import Place, Reply, serve
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution import Execution, Failure, RankResult, RunRequest
from fsdpcheck.trace import Trace

_POLL_SECONDS = 0.002
"""How often the driver looks at the table while it waits for replies; no verdict depends on it."""

_PRELOADED = [
    "fsdpcheck.engines._follower",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "torch.onnx",
]
"""Imported once by the server that workers are forked from, before it has any thread of its own."""


class ProcessesEngine:
    """Runs requests on real gloo processes; one pool of workers a world size, replaced after any failure.

    ``budget_seconds``: a limit the user sets on one run, for ranks that never stop computing; the failure is then
    "no progress", and never a deadlock. None: no limit. ``start_method``: "forkserver" starts a worker in tens of
    milliseconds from a server that has imported torch, "spawn" in seconds from nothing. A request's schedule is
    ignored: the machine's is taken.
    """

    name = "processes"

    def __init__(self, budget_seconds: float | None = None, start_method: str = "forkserver") -> None:
        self._budget, self._start_method = budget_seconds, start_method
        self._pools: dict[int, Pool] = {}
        atexit.register(_close_if_alive, weakref.ref(self))

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on its world size of processes. See engines/base.py for the guarantee."""
        adapters.load(request.adapter)
        _installs.check(request.installs)
        world_size = request.case.world_size
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size, self._start_method)
        try:
            execution = self._pools[world_size].run(request, self._budget)
        except BaseException:
            self._discard(world_size)
            raise
        if execution.failure is not None:
            self._discard(world_size)
        return execution

    def close(self) -> None:
        for world_size in list(self._pools):
            self._discard(world_size)

    def _discard(self, world_size: int) -> None:
        pool = self._pools.pop(world_size, None)
        if pool is not None:
            pool.close()


def _close_if_alive(engine: weakref.ref[ProcessesEngine]) -> None:
    alive = engine()
    if alive is not None:
        alive.close()


class Pool:
    """W workers and what they share. After a failure it must be closed, never reused."""

    def __init__(self, world_size: int, start_method: str) -> None:
        self.world_size, self._runs = world_size, 0
        self.folder = Path(tempfile.mkdtemp(prefix="fsdpcheck-"))
        self._workers: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            self._store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.places = [Place(rank, world_size, self._store.port, self.folder) for rank in range(world_size)]
            _table.create(self.places[0].table, world_size)
            self.table = _table.Table(self.places[0].table, world_size)
            context = multiprocessing.get_context(start_method)
            if start_method == "forkserver":
                context.set_forkserver_preload(_PRELOADED)
            for place in self.places:
                self._start(context, place)
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def run(self, request: RunRequest, budget: float | None) -> Execution:
        """One run to its end or failure. Raises only what the driver itself meets (KeyboardInterrupt)."""
        self._runs += 1
        watch = _Watch(self, self._runs, budget)
        payload = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(payload)
            except OSError:
                watch.dead.add(rank)
        failure = watch.until_over()
        return watch.execution(request, failure)

    def collect(self, rank: int) -> Reply | None:
        """The reply of a rank, if it has sent one."""
        pipe = self._pipes[rank]
        try:
            return pickle.loads(pipe.recv_bytes()) if pipe.poll() else None
        except (EOFError, ConnectionError):
            return None

    def wait(self, ranks: list[int]) -> None:
        """Return when one of these ranks has replied or died, or when it is time to look at the table."""
        sources: list[Any] = [self._pipes[rank] for rank in ranks] + [worker.sentinel for worker in self._workers]
        connection.wait(sources, timeout=_POLL_SECONDS)

    def exit_code(self, rank: int) -> int | None:
        """None while the worker lives; negative: minus the signal that killed it. Reaps it."""
        return self._workers[rank].exitcode

    def stacks(self, ranks: list[int]) -> dict[int, _stacks.Stack]:
        """Where the programs of these ranks stand. A rank that dies meanwhile has none."""
        files = {rank: self.places[rank].stack for rank in ranks}
        pids = {rank: self._workers[rank].pid or 0 for rank in ranks}
        return _stacks.collect(files, pids, lambda rank: self.exit_code(rank) is None)

    def last_words(self, rank: int) -> str:
        """The end of what a worker wrote to stderr."""
        path = self.places[rank].stderr
        return "\n".join(path.read_text(errors="replace").splitlines()[-10:]) if path.exists() else ""

    def close(self) -> None:
        """Kill and reap every worker, and remove what they shared. May be called twice."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, context: Any, place: Place) -> None:
        ours, theirs = context.Pipe()
        worker = context.Process(target=serve, args=(place, theirs), name=f"rank {place.rank}", daemon=True)
        worker.start()
        theirs.close()
        self._workers.append(worker)
        self._pipes.append(ours)

    def _await_ready(self) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.recv_bytes()
            except EOFError:
                self._workers[rank].join()
                code = self._workers[rank].exitcode
                words = self.last_words(rank)
                raise FsdpcheckError(f"worker of rank {rank} ended with {code} before its first run\n{words}") from None


class _Watch:
    """Follows one run from outside until it is over."""

    def __init__(self, pool: Pool, run: int, budget: float | None) -> None:
        self._pool, self._run, self._budget = pool, run, budget
        self._ranks = range(pool.world_size)
        self._began = time.monotonic()
        self._seen: tuple[_table.Header, ...] = ()
        self.replies: dict[int, Reply] = {}
        self.dead: set[int] = set()

    def until_over(self) -> Failure | None:
        """Wait for the end; None when every rank finished and their calls match."""
        while len(self.replies) < len(self._ranks):
            self._pool.wait([rank for rank in self._ranks if rank not in self.replies])
            self._collect()
            if self.dead:
                return self._lost()
            if (failure := self._stuck()) is not None:
                return failure
            if self._budget is not None and time.monotonic() - self._began > self._budget:
                return self._no_progress()
        return self._ended()

    def execution(self, request: RunRequest, failure: Failure | None) -> Execution:
        """What the run gave back; a rank that sent nothing has its trace only."""
        traces = self._traces(self._pool.table.read())
        results = [self.replies[rank].result if rank in self.replies else RankResult(rank) for rank in self._ranks]
        for rank, result in enumerate(results):
            result.trace = traces[rank]
        hits = [reply.hits for reply in self.replies.values()]
        summed = {name: sum(one.get(name, 0) for one in hits) for name in request.installs}
        return Execution(ProcessesEngine.name, request, results, failure, summed)

    def _collect(self) -> None:
        for rank in self._ranks:
            if rank not in self.replies and (reply := self._pool.collect(rank)) is not None:
                self.replies[rank] = reply
        self.dead |= {rank for rank in self._ranks if self._pool.exit_code(rank) is not None}

    def _ended(self) -> Failure | None:
        states = self._states(())
        if all(isinstance(state, deadlock.Finished) for state in states.values()):
            return deadlock.analyse(self._traces(self._pool.table.read()))
        return self._adapter() or deadlock.explain(states, self._traces(self._pool.table.read()))

    def _stuck(self) -> Failure | None:
        """A failure once it is proved that no rank can move; the proof is one consistent snapshot."""
        headers = self._pool.table.snapshot()
        settled, self._seen = headers is not None and headers == self._seen, headers or ()
        if headers is None or not settled:
            return None
        states, traces = self._states(headers), self._traces(headers)
        if not deadlock.nobody_can_move(states, traces):
            return None
        seconds = time.monotonic() - max(header.moved for header in headers) / 1e9
        stacks = self._pool.stacks([rank for rank, state in states.items() if isinstance(state, deadlock.Blocked)])
        self._collect()
        if self.dead:
            return self._lost()
        return self._adapter() or deadlock.explain(_placed(states, stacks), traces, seconds)

    def _lost(self) -> Failure:
        headers = self._pool.table.read()
        failure = deadlock.explain(self._states(headers), self._traces(headers))
        words = {rank: self._pool.last_words(rank) for rank in sorted(self.dead)}
        said = [f"rank {rank} wrote last:\n{text}" for rank, text in words.items() if text]
        return Failure(failure.kind, "\n".join([failure.text, *said]), failure.ranks, failure.exception)

    def _no_progress(self) -> Failure:
        states = self._states(self._pool.table.read())
        alive = [rank for rank, state in states.items() if isinstance(state, deadlock.Running | deadlock.Blocked)]
        placed = _placed(states, self._pool.stacks(alive))
        shown = deadlock.explain(placed, self._traces(self._pool.table.read()))
        lines = [f"no progress: the budget of {self._budget} s ran out while a rank could still run"]
        lines += [f"  rank {rank}: {_brief(placed[rank])}" for rank in self._ranks]
        return Failure("no progress", "\n".join(lines), shown.ranks)

    def _adapter(self) -> Failure | None:
        found = (self.replies[rank].adapter for rank in sorted(self.replies))
        return next((failure for failure in found if failure is not None), None)

    def _states(self, headers: tuple[_table.Header, ...]) -> dict[int, deadlock.State]:
        states: dict[int, deadlock.State] = {}
        for rank in self._ranks:
            if rank in self.replies:
                states[rank] = self.replies[rank].state
            elif rank in self.dead:
                states[rank] = _death(rank, self._pool.exit_code(rank))
            else:
                states[rank] = self._live(rank, headers[rank])
        return states

    def _live(self, rank: int, header: _table.Header) -> deadlock.State:
        if header.run != self._run or header.blocked_in is None:
            return deadlock.Running(rank)
        return deadlock.Blocked(rank, self._pool.table.trace(rank, header)[header.blocked_in])

    def _traces(self, headers: tuple[_table.Header, ...]) -> dict[int, Trace]:
        current = {rank: header for rank, header in enumerate(headers) if header.run == self._run}
        return {rank: self._pool.table.trace(rank, current[rank]) if rank in current else () for rank in self._ranks}


def _death(rank: int, code: int | None) -> deadlock.Exited | deadlock.Lost:
    if code is not None and code < 0:
        return deadlock.Lost(rank, signal.Signals(-code).name)
    return deadlock.Exited(rank, code or 0)


def _placed(states: Mapping[int, deadlock.State], stacks: Mapping[int, _stacks.Stack]) -> dict[int, deadlock.State]:
    """The states, with where each rank stands where that is known."""
    placed = dict(states)
    for rank, stack in stacks.items():
        match states[rank]:
            case deadlock.Blocked(_, collective):
                placed[rank] = deadlock.Blocked(rank, collective, stack.where, stack.lines)
            case deadlock.Running():
                placed[rank] = deadlock.Running(rank, stack.where, stack.lines)
    return placed


def _brief(state: deadlock.State) -> str:
    name = type(state).__name__.lower()
    match state:
        case deadlock.Blocked():
            return f"{name} in {state.collective}, at {state.where or 'an unknown place'}"
        case deadlock.Running():
            return f"{name}, at {state.where or 'an unknown place'}"
        case _:
            return name
