"""Where simulated ranks meet: instances of collectives, and what goes wrong at them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsdpcheck.compat import groups_private
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution import deadlock
from fsdpcheck.execution.matching import instance
from fsdpcheck.execution.recording import Call, RecordingGroup
from fsdpcheck.execution.tensor_rules import (
    GLOO_DTYPES,
    require_alike,
    require_scalars_of_gloo,
    require_stacked,
)
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation import single_rank
from fsdpcheck.simulation.current_rank import current_rank, require_rank
from fsdpcheck.simulation.exchange import LISTENERS, Instance, Run
from fsdpcheck.simulation.identity import NOTHING_KNOWN, Identity, crossed
from fsdpcheck.simulation.scheduler import place
from fsdpcheck.simulation.semantics import move, unequal_parts
from fsdpcheck.simulation.turns import in_turn
from fsdpcheck.simulation.work import MetWork


class Meeting(RecordingGroup):
    """A recorded process group whose members meet in memory."""

    def __init__(self, rank: int, size: int, run: Callable[[], Run]) -> None:
        super().__init__(rank, size)
        self._run = run
        self._counted: Run | None = None

    @property
    def calls(self) -> int:
        """How many calls this rank has made on this group in this run; groups outlive it."""
        self._count_anew()
        return super().calls

    def _sequence(self) -> int:
        """Calls are numbered anew in each run, and on in it where a rank makes a group of the same name again."""
        self._count_anew()
        return super()._sequence()

    def count_message(self, op: str, way: tuple[int, ...], tag: int | None) -> int:
        self._count_anew()
        return super().count_message(op, way, tag)

    def _count_anew(self) -> None:
        run = self._run()
        if run is not self._counted:
            self._counted = run
            before = run.groups.get((rank := current_rank(), *self.identity))
            self._calls = before.calls if before is not None else 0
            self._messages = before._messages if before is not None else {}
            run.groups[rank, *self.identity] = self
            asked = groups_private.asked_backend(self)
            run.like_nccl |= {self.identity[0]} if self._is_like_nccl() else set()
            run.like_gloo |= {self.identity[0]} if asked == "gloo" else set()

    def _is_like_nccl(self) -> bool:
        return "nccl" in groups_private.asked_backend(self)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Pieces may differ in shape on NCCL; gloo refuses that."""
        if self._is_gloo():
            require_alike("all_to_all", outputs, inputs)
        return super().alltoall(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Ranks' tensors may lie along a new dimension on NCCL; gloo refuses that."""
        if self._is_gloo():
            require_stacked("all_gather", output, input, self.size())
        return super().all_gather_single(output, input, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """As ``all_gather_single``."""
        if self._is_gloo():
            require_stacked("reduce_scatter", input, output, self.size())
        return super().reduce_scatter_single(output, input, opts)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def _is_gloo(self) -> bool:
        """Whether the program asked for gloo alone."""
        return groups_private.asked_backend(self) in ("gloo", "cpu:gloo")

    def _numbered_with(self, *call: object, **options: object) -> tuple[str, str]:
        return "group", repr(self.identity[0])

    def _matched_with(
        self, op: str, tensors: object, way: tuple[int, ...], tag: int, native: object
    ) -> tuple[str, ...]:
        to = f"sends to rank {way[1]} in" if op == "send" else "receives in"
        return f"{to} group", repr(self.identity[0]), f"tag {tag}"

    _go = in_turn(RecordingGroup._go, _numbered_with)  # the number of a call is given in turn too
    _message = in_turn(RecordingGroup._message, _matched_with)

    def _perform(self, call: Call) -> MetWork:
        run = self._run()
        run.children.require_none()
        rank = require_rank()
        if rank in run.left:  # it has swallowed the SystemExit that its os._exit was
            raise SystemExit(run.left[rank])
        moved = (*call.inputs, *call.outputs)
        if call.collective.tag is None and any(t.dtype not in GLOO_DTYPES for t in moved) and self._is_gloo():
            require_scalars_of_gloo(call.collective.op, moved)
        identity = self._identify(run, rank, call)
        run.traces[rank].append(call.collective)
        run.times[rank].append(call.times)
        call.times.append(next(run.clock))
        if run.baton.aborting:
            run.baton.block(rank)
        if run.alone_of:
            run.payloads.append(single_rank.payload(call))
            return MetWork(run, rank, single_rank.exchange(rank, call), call)
        under_way = run.open_calls[rank]
        if under_way and any(other.collective.group_name != call.collective.group_name for other in under_way):
            run.voids.add("calls on several groups were under way together")
        if call.collective.tag is not None:
            return run.messages.post(run, rank, self.identity, call)
        key = instance(call.collective)
        there = run.instances.get(key)
        if there is None:
            there = run.instances[key] = Instance(members=call.collective.group)
        work = MetWork(run, rank, there, call)
        there.calls[rank], there.identities[rank] = call, identity
        if len(there.calls) == len(there.members):
            del run.instances[key]
            _complete(run, there)
        return work

    def _identify(self, run: Run, rank: int, call: Call) -> Identity:
        """What the call is about, of a program that announces nothing; it is written down with the call."""
        if rank not in run.names:
            return NOTHING_KNOWN
        tensors = call.inputs or call.outputs
        found = run.names[rank].identify(tensors, sys._getframe(1))
        if found != NOTHING_KNOWN:
            call.collective = replace(call.collective, about=found.tensor, phase=found.place)
        return found


def _complete(run: Run, there: Instance) -> None:
    """The last member has come: check that all sides agree, compute, let the waiting members go on."""
    calls = [there.calls[member] for member in there.members]
    if calls[0].collective.op == "all_to_all" and (garbled := unequal_parts(there.members, calls)) is not None:
        run.fail(garbled)
        run.baton.block(require_rank())
    if not _agree([call.collective for call in calls]):
        refuse(run, there.calls)
    if run.names and crossed(calls[0].collective.op, there.identities, run.names):
        for rank, call in there.calls.items():
            found = there.identities[rank]
            write_down(run, rank, call, replace(call.collective, subject=found.tensor or found.module))
        refuse(run, there.calls)
    for listener in LISTENERS:
        listener(there.calls)
    run.streams.after(call.queued for call in calls)
    try:
        there.results = dict(zip(there.members, _computed(run, calls), strict=True))
        there.computed = run.streams.issued()
    except NotSupported:
        raise
    except Exception as error:  # as on gloo, where each rank computes and so finds out
        there.error = error
    there.end(run)


def _computed(run: Run, calls: list[Call]) -> list[list[Tensor]]:
    """The outputs of each member; none of it is the doing of the rank that came last."""
    watch = run.watches.get(require_rank())
    with nullcontext() if watch is None else watch.resting():
        return move(calls, run.averaging)


def _agree(members: list[Collective]) -> bool:
    """Equal in all that is computed with, and not known to be about different units."""
    first, *others = members
    wanted, subject = first.fingerprint, first.subject
    for other in others:
        if other.subject != subject and subject and other.subject:
            return False
        if other.fingerprint != wanted:
            return False
    return True


def write_down(run: Run, rank: int, call: Call, now: Collective) -> None:
    """More has become known of a call than when it was made."""
    calls, before = run.traces[rank], call.collective
    place = next(place for place in reversed(range(len(calls))) if calls[place] is before)
    calls[place] = call.collective = now


def refuse(run: Run, calls: Mapping[int, Call]) -> None:
    """All sides of a mismatch, once; then every rank is unwound."""
    states: dict[int, deadlock.State] = {}
    for rank, call in calls.items():
        where, stack = place(run.baton.frame(rank))
        if not call.collective.asynchronous:  # the rank may by now stand in a call of another of its threads
            where = call.collective.where or where
        states[rank] = deadlock.Blocked(rank, call.collective, where, stack)
    run.fail(deadlock.explain(states))
    current = current_rank()
    assert current is not None
    run.baton.block(current)
