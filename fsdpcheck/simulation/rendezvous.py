"""Where simulated ranks meet: instances of collectives, their works, and what goes wrong at them.

A call is *issued* without blocking; its outputs are written when the rank *waits* for it. Until then the outputs of an
asynchronous call hold a poison, so reading them early is seen, and inputs and outputs are compared at the wait, so
writing to a buffer in flight is seen.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from fsdpcheck.case import Averaging
from fsdpcheck.compat import torch_private
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution import Failure, deadlock
from fsdpcheck.execution.matching import ANY_SOURCE, instance
from fsdpcheck.execution.recording import Call, RecordingGroup
from fsdpcheck.execution.tensor_rules import (
    AS_MEMORY,
    GLOO_DTYPES,
    as_memory,
    require_alike,
    require_scalars_of_gloo,
    require_stacked,
)
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.children import Children
from fsdpcheck.simulation.decisions import Access, Decisions, Option, learn
from fsdpcheck.simulation.device.calls import OnGpu
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.device.timelines import Timeline
from fsdpcheck.simulation.here import here
from fsdpcheck.simulation.identity import NOTHING_KNOWN, Identity, Names, crossed
from fsdpcheck.simulation.in_flight import Flight, written_in_flight
from fsdpcheck.simulation.scheduler import Baton, place, where
from fsdpcheck.simulation.semantics import move, unequal_parts
from fsdpcheck.simulation.turns import in_turn
from fsdpcheck.simulation.watch import Watch


def current_rank() -> int | None:
    """The global rank this thread is, or None outside rank threads and those that they start."""
    return here.number


def set_current_rank(rank: int) -> None:
    here.number = rank


def require_rank() -> int:
    """The global rank this thread is. Raises NotSupported outside."""
    if here.number is None:
        raise NotSupported(
            f"torch.distributed was used in a thread that is no rank\n"
            f"  got     thread {threading.current_thread().name!r} of process {os.getpid()}\n"
            f"  wanted  the rank's own thread, or one that it started by threading or a ThreadPoolExecutor\n"
            f"  next    start the thread where the rank's program runs, or run on real ranks"
        )
    return here.number


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

    @property
    def children(self) -> Children: ...

    @property
    def messages(self) -> Messages: ...

    @property
    def decisions(self) -> Decisions | None: ...

    @property
    def heard(self) -> Decisions | None: ...

    def fail(self, failure: Failure) -> None: ...


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
            asked = torch_private.asked_backend(self)
            run.like_nccl |= {self.identity[0]} if self._is_like_nccl() else set()
            run.like_gloo |= {self.identity[0]} if asked == "gloo" else set()

    def _is_like_nccl(self) -> bool:
        return "nccl" in torch_private.asked_backend(self)

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
        return torch_private.asked_backend(self) in ("gloo", "cpu:gloo")

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
    try:
        there.results = dict(zip(there.members, _computed(run, calls), strict=True))
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


class _Future(torch.futures.Future[list[Tensor]]):
    """That of a work; to ask whether it is done is a poll."""

    def __init__(self, voids: set[str]) -> None:
        super().__init__()
        self._voids = voids

    def done(self) -> bool:
        self._voids.add("a future of a work was polled")
        return bool(super().done())


class MetWork(c10d.Work):
    """A call under way on one rank.

    Whoever keeps it in C++ (DistributedDataParallel's ``join`` does) keeps half of it, of which ``wait`` never returns:
    so the run keeps the other half, without its tensors once they are delivered.
    """

    _delivered = _kept = _left_early = _put_off = False
    after: Callable[[], object] | None = None
    """Called when it is over."""

    def __init__(self, run: Run, rank: int, there: Exchange, call: Call) -> None:
        c10d.Work.__init__(self)
        self._run, self._rank, self._there, self._call = run, rank, there, call
        sends = call.collective.op == "broadcast" and call.collective.root == rank
        watch, memory = run.watches.get(rank), run.memories.get(rank)
        self._on_gpu = None
        if memory is not None:
            self._on_gpu = OnGpu(memory, call, there.begun, call.collective.group_name in run.like_gloo)
        self._flight = Flight(call, sends, watch) if call.collective.asynchronous else None
        where = "" if watch is None or self._flight is None else torch_private.asked_directly(sys._getframe(1))
        if run.heard is not None:
            learn(there.known, run.heard.known_to(rank))
        if self._flight is not None:
            self._flight.inputs_stay = bool(where)
        self._open = OpenCall(call, where)
        run.open_calls[rank].append(self._open)

    def __del__(self) -> None:
        if self._kept:
            return
        self._kept = True
        if self._delivered:
            del self._there, self._call, self._flight, self._open
        self._run.works.append(self)
        if self._delivered:
            del self._run

    @in_turn
    def wait(self, timeout: Any = None) -> bool:
        """Block until all members have issued the call, then write this rank's outputs."""
        if timeout is not None and torch_private.asked_directly(sys._getframe(1)):
            self._run.voids.add("a work was waited for with a time-out, which nothing here takes")
        if not self._delivered:
            self._delivered = True
            self._call.times.append(next(self._run.clock))
            if not self._there.complete:
                self._block()
            watch = self._run.watches.get(self._rank)
            with nullcontext() if watch is None else watch.resting():
                self._deliver()
            if self._on_gpu is not None:
                self._on_gpu.wait()
            self._call.times.append(next(self._run.clock))
        return True

    def _source_rank(self) -> int:
        """The rank, in its group, that a received message came from. Raises RuntimeError for other calls, as gloo."""
        if self._call.collective.op not in ("recv", ANY_SOURCE):
            raise RuntimeError("sourceRank() may only be called on a work of recv or recv_anysource")
        self.wait()
        return self._there.source

    source_rank = _source_rank

    @in_turn
    def is_completed(self) -> bool:
        """A poll: its answer depends on the schedule, so it voids the claim for all. If True, outputs are there."""
        if self._run.decisions is not None:
            return self._decided(self._run.decisions) and self.wait()
        self._run.voids.add("a work was polled")
        if not self._there.complete:
            self._run.baton.pause(self._rank)
        return self._there.complete and self.wait()

    def _decided(self, decisions: Decisions) -> bool:
        """The answer to a poll that is decided: "not yet" once at most, complete or not; then this rank waits."""
        run, rank = self._run, self._rank
        run.voids.add("a work was polled: the answer 'not yet' was tried once a work")
        if self._put_off:
            return True
        name = decisions.name(rank, f"poll of {self._call.collective}")
        access = Access(rank, ("poll", name), False, where(sys._getframe(2)))
        answer: list[bool] = []

        def reply(complete: bool) -> None:
            answer.append(complete)
            del decisions.waiting[rank]
            run.baton.wake(rank)

        def options() -> list[Option]:
            complete = Option(name, f"{name}: complete", access, partial(reply, True), f"work of {name}")
            not_yet = Option(name, f"{name}: not yet", access, partial(reply, False))
            return [complete, not_yet] if self._there.complete else [not_yet]

        decisions.waiting[rank] = options
        run.baton.block(rank)
        self._put_off = not answer[0]
        return answer[0]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future of the outputs; waits for them, which is stronger than real backends."""
        self.wait()
        future = _Future(self._run.voids)
        future.set_result(self._call.outputs)
        return future

    def result(self) -> list[Tensor]:
        self.wait()
        return self._call.outputs

    def _block(self) -> None:
        run, there = self._run, self._there
        there.waiting.append(self._rank)
        run.waits.append(self)
        block(run, self._rank, self._call.collective, lambda: there.complete or self._left_early)
        run.waits.remove(self)

    def leave_early(self) -> bool:
        """Let the rank that waits here go on, if a backend that buffers would; whether it does.

        What it has sent is kept for those who come later."""
        collective = self._call.collective
        if not deadlock.leaves_early(self._rank, collective):
            return False
        self._call.inputs = [tensor.detach().clone() for tensor in self._call.inputs]
        if collective.op == "scatter":
            self._there.results[self._rank] = [self._call.inputs[collective.group.index(self._rank)]]
        self._left_early = True
        self._there.waiting.remove(self._rank)
        self._run.baton.wake(self._rank)
        return True

    def _deliver(self) -> None:
        touched = self._flight.end() if self._flight is not None else ""
        if touched:
            self._run.fail(written_in_flight(self._call.collective, self._rank, touched))
            self._run.baton.block(self._rank)
        self._run.open_calls[self._rank].remove(self._open)
        if self._run.heard is not None:
            learn(self._run.heard.known_to(self._rank), self._there.known)
        if self._there.error is not None:
            raise copy.copy(self._there.error).with_traceback(None)
        results = self._there.results.pop(self._rank, []) if self._left_early else self._there.results.pop(self._rank)
        memory = self._call.collective.op in AS_MEMORY
        for output, value in zip(self._call.outputs, results, strict=False):
            if output.is_sparse:
                with torch.no_grad():
                    output.copy_(value)
                continue
            place = (as_memory(output) if memory else output).data  # behind autograd's back, like a real backend
            place.copy_(value if value.shape == output.shape else value.reshape(output.shape))
        if self.after is not None:
            self.after()
