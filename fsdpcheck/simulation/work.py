"""The work of a call on one rank: issued at once, delivered when the rank waits for it, polled at the cost of a void.

Until it is delivered the outputs of an asynchronous call hold a poison, so reading them early is seen, and inputs and
outputs are compared at the wait, so writing to a buffer in flight is seen.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor

from fsdpcheck.compat import frames_private
from fsdpcheck.execution import deadlock
from fsdpcheck.execution.matching import ANY_SOURCE
from fsdpcheck.execution.recording import Call
from fsdpcheck.execution.tensor_rules import AS_MEMORY, as_memory
from fsdpcheck.simulation.decisions import Access, Decisions, Option, learn
from fsdpcheck.simulation.device.calls import OnGpu
from fsdpcheck.simulation.exchange import Exchange, OpenCall, Run, block
from fsdpcheck.simulation.in_flight import Flight, written_in_flight
from fsdpcheck.simulation.scheduler import where
from fsdpcheck.simulation.turns import in_turn


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
        refilled = run.decisions is not None and call.collective.where in run.decisions.refilled
        is_guarded = (
            call.collective.asynchronous
            and not run.alone_of
            and not frames_private.warms_a_pipeline_up(sys._getframe(1))
        )
        self._flight = Flight(call, sends, watch, refilled=refilled) if is_guarded else None
        guarded, asks = watch is not None and self._flight is not None, frames_private.asked_directly
        asked = asks(sys._getframe(1)) if guarded else ""
        where = asks(sys._getframe(1), functional=True) if guarded else ""
        if run.heard is not None:
            learn(there.known, run.heard.known_to(rank))
        if self._flight is not None:
            self._flight.inputs_stay = bool(asked)
        call.queued = run.streams.issued()
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
        if timeout is not None and frames_private.asked_directly(sys._getframe(1)):
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
        streams = self._run.streams
        streams.after([self._call.queued])  # this may be the thread of another rank
        self._call.inputs = [tensor.detach().clone() for tensor in self._call.inputs]
        self._call.queued = streams.issued()
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
        self._run.streams.after([self._there.computed])
        self._run.streams.used(results)
        for output, value in zip(self._call.outputs, results, strict=False):
            if output.is_sparse:
                with torch.no_grad():
                    output.copy_(value)
                continue
            place = (as_memory(output) if memory else output).data  # behind autograd's back, like a real backend
            place.copy_(value if value.shape == output.shape else value.reshape(output.shape))
        if self.after is not None:
            self.after()
