"""Streams and events of GPUs that are played on the CPU: all is done in the order of the program, and what is known to
come after what is kept by the timelines of simulation/device."""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar, Final

import torch

from fsdpcheck.execution.call_sites import line_of, line_text
from fsdpcheck.simulation.device.timelines import Moment, Timeline, Timelines

_MILLISECONDS: Final = 1e3


class PlayedStream:
    """A stream. Made by a program it is a new one, given a ``timeline`` it stands for that."""

    devices: ClassVar[Any] = None
    """Those of the run: ``here`` is of the rank whose turn it is."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, timeline: Timeline | None = None, **options: Any
    ) -> None:
        self.device, self.priority, self.cuda_stream = torch.device("cuda", 0), priority, 0
        self._before = self
        self.timeline = timeline or self._rank.stream(line_text(line_of(sys._getframe(1))))

    @property
    def _rank(self) -> Timelines:
        found: Timelines = self.devices.here.timelines
        return found

    def wait_stream(self, stream: PlayedStream) -> None:
        self.timeline.wait(self._rank.record(stream.timeline))

    def wait_event(self, event: PlayedEvent | None) -> None:
        if event is not None and event.moment is not None:
            self.timeline.wait(event.moment)

    def synchronize(self) -> None:
        self._rank.block(self._rank.record(self.timeline))

    def query(self) -> bool:
        """True: so the host knows that all is done."""
        self.synchronize()
        return True

    def record_event(self, event: PlayedEvent | None = None) -> PlayedEvent:
        event = event or self.devices.Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlayedStream) and other.timeline is self.timeline

    def __hash__(self) -> int:
        return hash(self.timeline)

    def __enter__(self) -> PlayedStream:
        self._before = self.devices.here.stream
        self.devices.here.stream = self
        return self

    def __exit__(self, *raised: object) -> None:
        self.devices.here.stream = self._before


class PlayedEvent:
    """What a stream had come to when it was recorded; ``elapsed_time`` is that of the CPU between two of them."""

    devices: ClassVar[Any] = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._at = time.perf_counter()
        self.moment: Moment | None = None
        """None before it is recorded: who waits for it does not wait."""

    @property
    def _rank(self) -> Timelines:
        found: Timelines = self.devices.here.timelines
        return found

    def record(self, stream: PlayedStream | None = None) -> None:
        self._at = time.perf_counter()
        self.moment = self._rank.record(self._rank.current if stream is None else stream.timeline)

    def wait(self, stream: PlayedStream | None = None) -> None:
        if self.moment is not None:
            (self._rank.current if stream is None else stream.timeline).wait(self.moment)

    def synchronize(self) -> None:
        if self.moment is not None:
            self._rank.block(self.moment)

    def query(self) -> bool:
        """True: so the host knows that all is done."""
        self.synchronize()
        return True

    def elapsed_time(self, later: PlayedEvent) -> float:
        """Milliseconds, above 0."""
        return max(later._at - self._at, sys.float_info.epsilon) * _MILLISECONDS
