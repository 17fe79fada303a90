"""Follows one run of real ranks from outside until it is over, and says what ended it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from fsdpcheck import process_state
from fsdpcheck.engines._real import group_requests, shared_table
from fsdpcheck.engines._real import stacks as _stacks
from fsdpcheck.engines._real.follower import Reply
from fsdpcheck.engines._real.pool import Pool
from fsdpcheck.execution import Execution, Failure, RankResult, RunRequest, deadlock
from fsdpcheck.execution.assembly import assemble
from fsdpcheck.execution.trace import Trace
from fsdpcheck.processes.limit import Limit, Spent


def run(pool: Pool, engine: str, request: RunRequest, budget: float | None, limit: Limit) -> Execution:
    """One run of ``pool`` to its end or failure. Raises only what the driver itself meets (KeyboardInterrupt)."""
    watch = _Watch(pool, budget, limit)
    pool.send(request)
    execution = assemble(watch.execution(engine, request, watch.until_over()))
    pool.spent = watch.spent
    return execution


class _Watch:
    """The next run of ``pool``."""

    def __init__(self, pool: Pool, budget: float | None, limit: Limit) -> None:
        self._pool, self._run, self._budget, self._limit = pool, pool.runs + 1, budget, limit
        self._ranks = range(pool.world_size)
        self._began = time.monotonic()
        self._seen: tuple[shared_table.Header, ...] = ()
        self.replies: dict[int, Reply] = {}
        self.dead: set[int] = set()
        self._spent = Spent(limit, self._processor, self._sleeps)

    def until_over(self) -> Failure | None:
        """Wait for the end; None when every rank finished and their calls match."""
        while len(self.replies) < len(self._ranks):
            self._pool.wait()
            self._collect()
            if self.dead:
                return self._lost()
            if (failure := self._stuck()) is not None:
                return failure
            if self._budget is not None and time.monotonic() - self._began > self._budget:
                return self._no_progress(f"the budget of {self._budget} s ran out while a rank could still run")
            if self._spent.is_due:
                self._spent.look()
                if why := self._spent.exceeded:
                    return self._no_progress(why)
        self._limit.learn(self._spent.seconds)
        return self._ended()

    def execution(self, engine: str, request: RunRequest, failure: Failure | None) -> Execution:
        """What the run gave back; a rank that sent nothing has its trace only."""
        traces = self._traces(self._pool.table.read())
        results = [self.replies[rank].result if rank in self.replies else RankResult(rank) for rank in self._ranks]
        for rank, result in enumerate(results):
            result.trace = group_requests.left_out(traces[rank])
        hits = [reply.hits for reply in self.replies.values()]
        summed = {name: sum(one.get(name, 0) for one in hits) for name in request.installs}
        execution = Execution(engine, request, results, failure, summed, left=self._left())
        for reply in self.replies.values():
            execution.files |= reply.files
            execution.packages |= reply.packages
        return execution

    @property
    def spent(self) -> bool:
        """Whether a worker cannot be used again."""
        return any(reply.spent for reply in self.replies.values())

    def _left(self) -> tuple[str, ...]:
        left = process_state.of_each({rank: reply.left for rank, reply in self.replies.items()})
        imported = dict.fromkeys(said for reply in self.replies.values() for said in reply.imported)
        return (*process_state.sentences(left, len(self._ranks)), *imported)

    def _collect(self) -> None:
        for rank in self._ranks:
            if rank not in self.replies and (reply := self._pool.collect(rank)) is not None:
                self.replies[rank] = reply
        self.dead |= {rank for rank in self._ranks if self._pool.links[rank].exit_code() is not None}

    def _ended(self) -> Failure | None:
        states = self._states(())
        if all(isinstance(state, deadlock.Finished) for state in states.values()):
            headers = self._pool.table.read()
            traces = {rank: group_requests.left_out(trace) for rank, trace in self._traces(headers).items()}
            return deadlock.analyse(traces, ordered=not any(header.elsewhere for header in headers))
        return self._adapter() or deadlock.explain(states, self._traces(self._pool.table.read()))

    def _stuck(self) -> Failure | None:
        """A failure once it is proved that no rank can move; the proof is one consistent snapshot."""
        headers = self._pool.table.snapshot()
        settled, self._seen = headers is not None and headers == self._seen, headers or ()
        if headers is None or not settled:
            return None
        states, traces = self._states(headers), self._traces(headers)
        if not all(deadlock.nobody_can_move(each, traces) for each in self._by_thread(states, headers)):
            return None
        if (disagree := group_requests.disagreement(states, traces)) is not None:
            return disagree
        seconds = time.monotonic() - max(header.moved for header in headers) / 1e9
        stacks = self._pool.stacks([rank for rank, state in states.items() if isinstance(state, deadlock.Blocked)])
        self._collect()
        if self.dead:
            return self._lost()
        return self._adapter() or deadlock.explain(_placed(states, stacks), traces, seconds)

    def _by_thread(
        self, states: dict[int, deadlock.State], headers: tuple[shared_table.Header, ...]
    ) -> Iterator[dict[int, deadlock.State]]:
        """The states; then, for each thread of a rank beside its program, those with what that thread waits for."""
        yield states
        for rank, state in states.items():
            if isinstance(state, deadlock.Blocked):
                calls = self._pool.table.trace(rank, headers[rank])
                for index in headers[rank].blocked[1:]:
                    yield {**states, rank: deadlock.Blocked(rank, calls[index])}

    def _lost(self) -> Failure:
        headers = self._pool.table.read()
        failure = deadlock.explain(self._states(headers), self._traces(headers))
        words = {rank: self._pool.last_words(rank) for rank in sorted(self.dead)}
        said = [f"rank {rank} wrote last:\n{text}" for rank, text in words.items() if text]
        return Failure(failure.kind, "\n".join([failure.text, *said]), failure.ranks, failure.exception)

    def _processor(self) -> float:
        """Seconds of processor time of the rank that has used most of it, in all runs of this pool."""
        return max((link.processor_seconds() for link in self._pool.links), default=0.0)

    def _sleeps(self) -> tuple[str, ...]:
        return tuple(link.sleep() for rank, link in enumerate(self._pool.links) if rank not in self.replies)

    def _no_progress(self, why: str) -> Failure:
        states = self._states(self._pool.table.read())
        alive = [rank for rank, state in states.items() if isinstance(state, deadlock.Running | deadlock.Blocked)]
        placed = _placed(states, self._pool.stacks(alive))
        shown = deadlock.explain(placed, self._traces(self._pool.table.read()))
        if shown.kind in ("raised", "exited"):  # that is what went wrong first
            return self._adapter() or shown
        lines = [f"no progress: {why}"]
        lines += [f"  rank {rank}: {_brief(placed[rank])}" for rank in self._ranks]
        return Failure("no progress", "\n".join(lines), shown.ranks)

    def _adapter(self) -> Failure | None:
        found = (self.replies[rank].adapter for rank in sorted(self.replies))
        return next((failure for failure in found if failure is not None), None)

    def _states(self, headers: tuple[shared_table.Header, ...]) -> dict[int, deadlock.State]:
        states: dict[int, deadlock.State] = {}
        for rank in self._ranks:
            if rank in self.replies:
                states[rank] = self.replies[rank].state
            elif rank in self.dead:
                states[rank] = _death(rank, self._pool.links[rank].exit_code())
            else:
                states[rank] = self._live(rank, headers[rank])
        return states

    def _live(self, rank: int, header: shared_table.Header) -> deadlock.State:
        if header.run != self._run or header.blocked_in is None:
            return deadlock.Running(rank)
        return deadlock.Blocked(rank, self._pool.table.trace(rank, header)[header.blocked_in])

    def _traces(self, headers: tuple[shared_table.Header, ...]) -> dict[int, Trace]:
        current = {rank: header for rank, header in enumerate(headers) if header.run == self._run}
        return {
            rank: shared_table.performed(self._pool.table.trace(rank, current[rank])) if rank in current else ()
            for rank in self._ranks
        }


def _death(rank: int, code: int | None) -> deadlock.Exited | deadlock.Lost:
    return deadlock.lost(rank, code) if code is not None and code < 0 else deadlock.Exited(rank, code or 0)


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
