"""Forked ranks that publish what they wait for: when no rank can move, that is proved and told at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import torch.distributed as dist

from fsdpcheck.compat import groups_private
from fsdpcheck.engines._real import backends, group_requests, shared_table
from fsdpcheck.engines._real.forks import Forked, Said
from fsdpcheck.engines._real.groups import Publishing
from fsdpcheck.engines._real.shared_table import Header, Row, Table
from fsdpcheck.execution import Failure, deadlock
from fsdpcheck.execution.deadlock import Blocked, Exited, Finished, Raised, Running, State
from fsdpcheck.execution.trace import Trace

_RUN: Final = 1


def publish(table: Path, rank: int) -> None:
    """Have the groups over gloo and NCCL that this process makes from now on publish to its row of ``table``."""
    row = Row(table, rank)
    row.begin(_RUN)
    groups_private.stand_in_for("gloo", groups_private.OVER_GLOO, Publishing(row).making)
    if dist.is_nccl_available():
        over_nccl = Publishing(row, backends.over_nccl, groups_private.OVER_NCCL)
        groups_private.stand_in_for("nccl", groups_private.OVER_NCCL, over_nccl.making)


class Watch:
    """Looks at the table of forked ranks. ``failure``: the hang, once it is proved."""

    def __init__(self, ranks: Forked, path: Path, world_size: int) -> None:
        self._ranks, self._table, self._size = ranks, Table(path, world_size), world_size
        self._seen: tuple[Header, ...] = ()
        self.failure: Failure | None = None

    def close(self) -> None:
        self._table.close()

    def look(self) -> bool:
        """Whether no rank can move. While one has failed the others may yet say more, and nothing is asked."""
        headers = self._table.snapshot()
        settled, self._seen = headers is not None and headers == self._seen, headers or ()
        if headers is None or not settled or any(said.fails for said in self._ranks.said.values()):
            return False
        logs = {rank: self._log(rank, header) for rank, header in enumerate(headers)}
        traces = {rank: shared_table.performed(log) for rank, log in logs.items()}
        states = self._states(headers, logs)
        each = [states, *self._of_threads(states, headers, logs)]
        if not all(deadlock.nobody_can_move(one, traces) for one in each):
            return False
        seconds = time.monotonic() - max(header.moved for header in headers) / 1e9
        disagreement = group_requests.disagreement(states, traces)
        self.failure = disagreement or deadlock.explain(self._placed(states), traces, seconds)
        return True

    def completed(self) -> Failure | None:
        """What is wrong with the calls of ranks that have all returned; which of it gloo lets pass is chance."""
        headers = self._table.snapshot()
        if headers is None:  # a thread that was left goes on calling
            return None
        traces = {rank: shared_table.performed(self._log(rank, header)) for rank, header in enumerate(headers)}
        return deadlock.analyse(traces, ordered=not any(header.elsewhere for header in headers))

    def _log(self, rank: int, header: Header) -> Trace:
        return self._table.trace(rank, header) if header.run == _RUN else ()

    def _states(self, headers: tuple[Header, ...], logs: dict[int, Trace]) -> dict[int, State]:
        states: dict[int, State] = {}
        for rank, header in enumerate(headers):
            if rank in self._ranks.said:
                states[rank] = state_of(rank, self._ranks.said[rank])
            elif header.blocked_in is not None:
                states[rank] = Blocked(rank, logs[rank][header.blocked_in])
            else:
                states[rank] = Running(rank)
        return states

    def _of_threads(
        self, states: dict[int, State], headers: tuple[Header, ...], logs: dict[int, Trace]
    ) -> list[dict[int, State]]:
        """The states with what another thread of a rank waits for in place of what its program does."""
        return [
            {**states, rank: Blocked(rank, logs[rank][index])}
            for rank, header in enumerate(headers)
            for index in header.blocked[1:]
            if rank not in self._ranks.said
        ]

    def _placed(self, states: dict[int, State]) -> dict[int, State]:
        """The states, with where each rank stands."""
        stacks = self._ranks.stacks([rank for rank, state in states.items() if isinstance(state, Blocked)])
        return {
            rank: Blocked(rank, state.collective, stacks[rank].where, stacks[rank].lines)
            if isinstance(state, Blocked)
            else state
            for rank, state in states.items()
        }


def state_of(rank: int, said: Said) -> State:
    """What a rank is said to have come to, as a state."""
    if said.kind == "gone":
        return deadlock.lost(rank, said.what) if said.what < 0 else Exited(rank, said.what)
    return said.what if isinstance(said.what, Raised | Exited) else Finished(rank)
