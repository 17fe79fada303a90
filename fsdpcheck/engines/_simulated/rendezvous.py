"""Where simulated ranks meet: instances of collectives, their works, and what goes wrong at them.

A call is *issued* without blocking; its outputs are written when the rank *waits* for it. Until then the outputs of an
asynchronous call hold a poison, so reading them early is seen, and inputs and outputs are compared at the wait, so
writing to a buffer in flight is seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from fsdpcheck.case import Averaging
from fsdpcheck.engines._common.recording import Call, RecordingGroup
from fsdpcheck.engines._common.tensor_rules import AS_MEMORY, as_memory
from fsdpcheck.engines._simulated.scheduler import Baton, place
from fsdpcheck.engines._simulated.semantics import move
from fsdpcheck.engines._simulated.turns import here, in_turn
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution import Failure, deadlock
from fsdpcheck.execution.matching import instance
from fsdpcheck.execution.trace import Collective


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
class Instance:
    """One collective of all its members; complete when the last has issued it."""

    members: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    results: dict[int, list[Tensor]] = field(default_factory=dict)
    complete: bool = False
    waiting: list[int] = field(default_factory=list)


class Run(Protocol):
    """What a meeting needs of the run it is part of."""

    averaging: Averaging
    baton: Baton
    blocked_in: dict[int, Collective]
    instances: dict[tuple[object, ...], Instance]
    traces: dict[int, list[Collective]]
    voids: set[str]
    open_calls: dict[int, list[Collective]]
    left: dict[int, int]
    groups: dict[tuple[object, ...], RecordingGroup]
    works: list[MetWork]

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

    def _count_anew(self) -> None:
        run = self._run()
        if run is not self._counted:
            self._counted = run
            before = run.groups.get((rank := current_rank(), *self.identity))
            self._calls = before.calls if before is not None else 0
            run.groups[rank, *self.identity] = self

    _go = in_turn(RecordingGroup._go)  # the number of a call is given in turn too

    def _perform(self, call: Call) -> MetWork:
        run, rank = self._run(), require_rank()
        if rank in run.left:  # it has swallowed the SystemExit that its os._exit was
            raise SystemExit(run.left[rank])
        run.traces[rank].append(call.collective)
        if run.baton.aborting:
            run.baton.block(rank)
        under_way = run.open_calls[rank]
        if under_way and any(other.group_name != call.collective.group_name for other in under_way):
            run.voids.add("calls on several groups were under way together")
        under_way.append(call.collective)
        key = instance(call.collective)
        there = run.instances.get(key)
        if there is None:
            there = run.instances[key] = Instance(call.collective.group)
        work = MetWork(run, rank, there, call)
        there.calls[rank] = call
        if len(there.calls) == len(there.members):
            del run.instances[key]
            _complete(run, there)
        return work


def _complete(run: Run, there: Instance) -> None:
    """The last member has come: check that all sides agree, compute, let the waiting members go on."""
    calls = [there.calls[member] for member in there.members]
    if not _agree([call.collective for call in calls]):
        _refuse(run, there)
    results = move(calls, run.averaging)
    there.results = dict(zip(there.members, results, strict=True))
    there.complete = True
    for rank in there.waiting:
        run.baton.wake(rank)


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


def _refuse(run: Run, there: Instance) -> None:
    """All sides of a mismatch, once; then every rank is unwound."""
    states: dict[int, deadlock.State] = {}
    for rank, call in there.calls.items():
        where, stack = place(run.baton.frame(rank))
        states[rank] = deadlock.Blocked(rank, call.collective, where, stack)
    run.fail(deadlock.explain(states))
    current = current_rank()
    assert current is not None
    run.baton.block(current)


class MetWork(c10d.Work):
    """A call under way on one rank.

    Whoever keeps it in C++ (DistributedDataParallel's ``join`` does) keeps half of it, of which ``wait`` never returns:
    so the run keeps the other half, without its tensors once they are delivered.
    """

    _delivered = _kept = False

    def __init__(self, run: Run, rank: int, there: Instance, call: Call) -> None:
        c10d.Work.__init__(self)
        self._run, self._rank, self._there, self._call = run, rank, there, call
        sends = call.collective.op == "broadcast" and call.collective.root == rank
        self._flight = _Flight(call, sends) if call.collective.asynchronous else None

    def __del__(self) -> None:
        if self._kept:
            return
        self._kept = True
        if self._delivered:
            del self._there, self._call, self._flight
        self._run.works.append(self)
        if self._delivered:
            del self._run

    @in_turn
    def wait(self, timeout: Any = None) -> bool:
        """Block until all members have issued the call, then write this rank's outputs."""
        if not self._delivered:
            self._delivered = True
            if not self._there.complete:
                self._block()
            self._deliver()
        return True

    @in_turn
    def is_completed(self) -> bool:
        """A poll: its answer depends on the schedule, so it voids the claim for all. If True, outputs are there."""
        self._run.voids.add("a work was polled")
        if not self._there.complete:
            self._run.baton.pause(self._rank)
        return self._there.complete and self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future of the outputs; waits for them, which is stronger than real backends."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._call.outputs)
        return future

    def result(self) -> list[Tensor]:
        self.wait()
        return self._call.outputs

    def _block(self) -> None:
        run = self._run
        self._there.waiting.append(self._rank)
        run.blocked_in[self._rank] = self._call.collective
        run.baton.block(self._rank)
        del run.blocked_in[self._rank]

    def _deliver(self) -> None:
        touched = self._flight.touched() if self._flight is not None else ""
        if touched:
            self._run.fail(_written_in_flight(self._call.collective, self._rank, touched))
            self._run.baton.block(self._rank)
        self._run.open_calls[self._rank].remove(self._call.collective)
        results = self._there.results.pop(self._rank)
        memory = self._call.collective.op in AS_MEMORY
        for output, value in zip(self._call.outputs, results, strict=False):
            place = (as_memory(output) if memory else output).data  # behind autograd's back, like a real backend
            place.copy_(value if value.shape == output.shape else value.reshape(output.shape))


class _Flight:
    """Guards the buffers of one asynchronous call from issue to wait; gives the call private copies of its inputs.

    ``sends``: the rank is the root of a broadcast, whose own tensor is not written.
    """

    def __init__(self, call: Call, sends: bool) -> None:
        with torch.no_grad():
            self._inputs = [(tensor, tensor.detach().clone()) for tensor in call.inputs]
            self._outputs = [] if sends else call.outputs
            call.inputs = [copy for _, copy in self._inputs]
            for tensor in self._outputs:
                _poison_(tensor)
            if len(self._outputs) == 1:
                _salt_(self._outputs[0])
            # an input may share memory with an output (FSDP2 gathers in place): what it holds now is the baseline
            self._now = [tensor.detach().clone() for tensor, _ in self._inputs]
            self._salted = self._outputs[0].detach().clone() if len(self._outputs) == 1 else None
        self._tensors = [t for t in [*(tensor for tensor, _ in self._inputs), *self._outputs] if not t.is_inference()]
        self._versions = self._read_versions()

    def touched(self) -> str:
        """Which buffer was written since the call was issued; "" when none was.

        Values decide; of several outputs (a gather) only where a version counter says that something was written. A
        counter is shared by all views of a storage, so by itself it only decides for a tensor that is its storage.
        """
        with torch.no_grad():
            for (tensor, _), before in zip(self._inputs, self._now, strict=True):
                if _is_there(tensor) and not _same_bits(tensor, before):
                    return f"an input of shape {list(tensor.shape)}"
            if self._salted is not None and not _same_bits(self._outputs[0], self._salted):
                return f"an output of shape {list(self._outputs[0].shape)}"
            return self._counted()

    def _counted(self) -> str:
        """Which buffer was written by the version counters."""
        changed = [now != then for now, then in zip(self._read_versions(), self._versions, strict=True)]
        if not any(changed):
            return ""
        for tensor, written in zip(self._tensors, changed, strict=True):
            if written and _is_whole_storage(tensor):
                return f"a buffer of shape {list(tensor.shape)}"
        for tensor in self._outputs:
            if self._salted is None and not bool(_is_poison(tensor).all()):
                return f"an output of shape {list(tensor.shape)}"
        return ""

    def _read_versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _is_whole_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _poison_(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).max)


def _salt_(tensor: Tensor) -> None:
    """Every second element of the poison becomes a number: arithmetic on NaN gives NaN, and would stay unseen."""
    if tensor.is_floating_point() and tensor.is_contiguous():
        tensor.data.view(-1)[::2] = torch.finfo(tensor.dtype).min / 4


def _is_there(tensor: Tensor) -> bool:
    """Whether the memory has not been freed meanwhile, as sharded implementations do with what they have sent."""
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()


def _is_poison(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    return tensor == torch.iinfo(tensor.dtype).max


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _written_in_flight(collective: Collective, rank: int, touched: str) -> Failure:
    return Failure(
        "in-flight",
        f"rank {rank} wrote to {touched} of a call before waiting for it\n  call    {collective}\n"
        f"  next    wait for the work before its buffers are reused",
    )
