"""What ranks exchange in one call: an instance of it, the values that come of it, and what a run keeps of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fsdpcheck.case import Averaging
from fsdpcheck.execution import Failure
from fsdpcheck.execution.recording import Call, RecordingGroup
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.children import Children
from fsdpcheck.simulation.current_rank import here
from fsdpcheck.simulation.decisions import Decisions
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.device.timelines import Timeline
from fsdpcheck.simulation.identity import Identity, Names
from fsdpcheck.simulation.scheduler import Baton
from fsdpcheck.simulation.streams import OnHost
from fsdpcheck.simulation.watch import Watch

if TYPE_CHECKING:
    from fsdpcheck.simulation.work import MetWork


LISTENERS: list[Callable[[Mapping[int, Call]], object]] = []
"""Called with all sides of a collective, or of a message, by rank, before its values are computed."""


@dataclass(slots=True)
class Exchange:
    """What works wait for: ``results``, the values of each rank's outputs. ``source``: of a message, in its group.

    ``error``: what every rank raises in place of results, where there cannot be any.
    """

    results: dict[int, list[Tensor]] = field(default_factory=dict)
    error: Exception | None = None
    complete: bool = False
    waiting: list[int] = field(default_factory=list)
    source: int = -1
    known: dict[int, int] = field(default_factory=dict)
    """What the members had heard of, of a program that is watched."""
    computed: Any = None
    """Of ranks that share a GPU: what the results come after (simulation/streams.py)."""
    begun: dict[Timeline, int] = field(default_factory=dict)
    """Of ranks with a GPU: what their streams had come to when they issued it."""

    def end(self, run: Run) -> None:
        """The results are there: those that wait go on."""
        self.complete = True
        for rank in self.waiting:
            run.baton.wake(rank)


@dataclass(slots=True, kw_only=True)
class Instance(Exchange):
    """One collective of all its members; complete when the last has issued it."""

    members: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    identities: dict[int, Identity] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that has been issued and not yet waited for.

    ``issued_at``: where a program that is watched has itself asked for an asynchronous one; "" otherwise.
    """

    call: Call
    issued_at: str

    @property
    def collective(self) -> Collective:
        return self.call.collective


class Messages(Protocol):
    """Where messages between two ranks meet (simulation/messages.py)."""

    def post(self, run: Run, rank: int, group: tuple[str, tuple[int, ...]], call: Call) -> MetWork: ...


class Run(Protocol):
    """What a meeting needs of the run it is part of."""

    averaging: Averaging
    baton: Baton
    blocked_in: dict[int, Collective]
    waits: list[MetWork]
    instances: dict[tuple[object, ...], Instance]
    traces: dict[int, list[Collective]]
    times: dict[int, list[list[int]]]
    clock: Iterator[int]
    voids: set[str]
    open_calls: dict[int, list[OpenCall]]
    left: dict[int, int]
    groups: dict[tuple[object, ...], RecordingGroup]
    like_nccl: set[str]
    like_gloo: set[str]
    works: list[MetWork]
    watches: dict[int, Watch]
    memories: dict[int, Memory]
    names: dict[int, Names]
    alone_of: int
    payloads: list[int]
    streams: OnHost

    @property
    def children(self) -> Children: ...

    @property
    def messages(self) -> Messages: ...

    @property
    def decisions(self) -> Decisions | None: ...

    @property
    def heard(self) -> Decisions | None: ...

    def fail(self, failure: Failure) -> None: ...


def block(run: Run, rank: int, call: Collective, until: Callable[[], bool]) -> None:
    """Let this thread of a rank be blocked in a call until it can go on; its others go on. May raise Aborted."""

    def sleep() -> None:
        run.blocked_in[rank] = call
        run.baton.block(rank)
        del run.blocked_in[rank]

    turn = here.turn or here.lent
    if turn is None:
        sleep()
    else:
        turn.block(until, sleep)
