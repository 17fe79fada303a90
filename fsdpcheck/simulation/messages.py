"""Messages between simulated ranks: who has sent, who wants to receive, and which of them meet.

A message is matched by its group, source, destination and tag, in the order in which either side has asked: so which
meet does not depend on the schedule, except where somebody receives from any source, which is noted in the run's voids.
Sides meet at a rendezvous: a send ends when its message is received, as on gloo, for tensors of every size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from fsdpcheck.execution.matching import ANY_SOURCE, differing
from fsdpcheck.execution.recording import Call
from fsdpcheck.simulation.decisions import Access, Decisions, Option, learn
from fsdpcheck.simulation.exchange import LISTENERS, Exchange, Run
from fsdpcheck.simulation.rendezvous import refuse, write_down
from fsdpcheck.simulation.work import MetWork

Identity = tuple[str, tuple[int, ...]]
_Way = tuple[Identity, int, int | None]
"""Group, destination and tag."""


@dataclass(slots=True, eq=False)
class _Side:
    """One side of a message that the other has not come to yet. ``source``: None for any."""

    rank: int
    source: int | None
    call: Call
    there: Exchange
    name: str = ""
    """Of a receive from any source, in a run that is decided."""


class Messages:
    """The messages of one run that have been asked for on one side only."""

    def __init__(self) -> None:
        self._sent: dict[_Way, list[_Side]] = defaultdict(list)
        self._wanted: dict[_Way, list[_Side]] = defaultdict(list)

    def options(self, run: Run) -> Iterator[Option]:
        """Who could be received by those who receive from any source, in a run that is decided."""
        for way, wanted in self._wanted.items():
            first_of_each = {side.rank: side for side in reversed(self._sent[way])}
            for anybody in [side for side in wanted if side.source is None][:1]:
                for rank, sent in sorted(first_of_each.items()):
                    take = partial(self._take, run, way, sent, anybody)
                    key = f"{anybody.name} from rank {rank}"
                    taker = f"messages from rank {rank} to rank {anybody.rank}, tag {way[2]} of {way[0]}"
                    yield Option(anybody.name, key, _access(anybody, way), take, taker)

    def _take(self, run: Run, way: _Way, sent: _Side, wanted: _Side) -> None:
        self._sent[way].remove(sent)
        self._wanted[way].remove(wanted)
        _meet(run, way[0], sent, wanted)

    def pending(self) -> Iterator[tuple[int, Call]]:
        """The calls whose other side has not come, with the rank of each."""
        for sides in (*self._sent.values(), *self._wanted.values()):
            yield from ((side.rank, side.call) for side in sides)

    def post(self, run: Run, rank: int, group: Identity, call: Call) -> MetWork:
        """One side of a message; it meets the first of the others that fits, or waits for one to come."""
        asked = call.collective
        sends = asked.op == "send"
        source = asked.group[0] if asked.op != ANY_SOURCE else None
        side = _Side(rank, source, call, Exchange())
        way = (group, asked.group[1] if sends else rank, asked.tag)
        work = MetWork(run, rank, side.there, call)
        if run.decisions is not None:
            _tell(run.decisions, side, way)
        if sends:
            other = next((wanted for wanted in self._wanted[way] if wanted.source in (rank, None)), None)
            if run.decisions is not None and other is not None and other.source is None:
                other = None  # it is decided later who is received
            mine, others = self._sent[way], self._wanted[way]
        else:
            other = _chosen(run, source, self._sent[way])
            mine, others = self._wanted[way], self._sent[way]
        if other is None:
            mine.append(side)
        else:
            others.remove(other)
            _meet(run, group, *((side, other) if sends else (other, side)))
        return work


def _chosen(run: Run, source: int | None, sent: list[_Side]) -> _Side | None:
    """The message that is received: the first of its source; of any source, the first of the one that is chosen."""
    if source is None and run.decisions is not None:
        return None
    if source is None:
        run.voids.add("a message was received from any source")
        senders = sorted({side.rank for side in sent})
        source = run.baton.choose(senders) if senders else None
    return next((side for side in sent if side.rank == source), None)


def _access(side: _Side, way: _Way) -> Access:
    return Access(side.rank, ("messages", *way), True, side.call.collective.where)


def _tell(decisions: Decisions, side: _Side, way: _Way) -> None:
    """Who sends may be received by somebody who receives from any source; who receives so is known by name."""
    if side.call.collective.op == ANY_SOURCE:
        side.name = decisions.name(side.rank, f"receive from any source, tag {way[2]}")
    elif side.call.collective.op == "send":
        decisions.note(_access(side, way))


def _meet(run: Run, group: Identity, sent: _Side, wanted: _Side) -> None:
    """Both sides are there: write down who received which message, and give it to them."""
    message = sent.call.collective
    received = replace(wanted.call.collective, op="recv", group=message.group, sequence=message.sequence)
    write_down(run, wanted.rank, wanted.call, received)
    if wanted.source is None:
        run.groups[wanted.rank, *group].count_message("recv", message.group, message.tag)
    if differing(message, received):
        refuse(run, {sent.rank: sent.call, wanted.rank: wanted.call})
    for listener in LISTENERS:
        listener({sent.rank: sent.call, wanted.rank: wanted.call})
    wanted.there.source = group[1].index(sent.rank)
    run.streams.after([sent.call.queued])
    wanted.there.results = {wanted.rank: [tensor.detach().clone() for tensor in sent.call.inputs]}
    wanted.there.computed = sent.there.computed = run.streams.issued()
    sent.there.results = {sent.rank: []}
    learn(wanted.there.known, sent.there.known)
    for side in (sent, wanted):
        side.there.end(run)
