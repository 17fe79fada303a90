"""Calls of process groups on a GPU: on which stream they run, what they come after, and who waits for them."""

from __future__ import annotations

from fsdpcheck.execution.recording import Call
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.device.timelines import Moment, Timeline


class OnGpu:
    """One rank's side of a call, as NCCL does it.

    A call that is waited for at once runs on the current stream; an asynchronous one on the stream of its group, which
    comes after what the current stream has so far. Who waits is the current stream of the wait, and the host only at a
    barrier and where ``host_waits``, as gloo's does. The call ends after each member has begun it: ``begun`` is shared
    by all, and for a broadcast says more than there is.
    """

    def __init__(self, memory: Memory, call: Call, begun: dict[Timeline, int], host_waits: bool) -> None:
        self._timelines, self._begun = memory.timelines, begun
        collective = call.collective
        self._host_waits = host_waits or "barrier" in collective.op
        stream = current = self._timelines.launch(self._timelines.current)
        if collective.asynchronous:
            name = collective.group_name
            stream = self._timelines.of_group((name, collective.group), name)
            stream.wait(current.moment())
        memory.used_by_call(call.inputs, call.outputs, stream, f"{collective.op} #{collective.sequence}")
        self._stream, self._done = stream, stream.moment()
        for other, time in self._done.items():
            begun[other] = max(begun.get(other, 0), time)

    def wait(self) -> None:
        """The rank waits for the call, which is complete."""
        current = self._timelines.launch(self._timelines.current)
        for moment in (self._done, self._begun):
            self._wait(current, moment)
            self._wait(self._stream, moment)

    def _wait(self, stream: Timeline, moment: Moment) -> None:
        stream.wait(moment)
        if self._host_waits:
            self._timelines.block(moment)
