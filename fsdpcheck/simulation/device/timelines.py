"""Happens-before, by vector clocks: what runs in order, and what of others it is known to come after.

A timeline is a stream, the communication stream of a process group, or the host of one rank. What is issued on it
carries its ``time``, which grows when others may wait for it: so equal times are ordered within a timeline, and across
two timelines by what one knows of the other.
"""

from __future__ import annotations

from collections.abc import Mapping


class Timeline:
    """What runs in order. ``name``: as reports call it. ``knows``: of others, up to which time it comes after them."""

    __slots__ = ("host_time", "in_graph", "knows", "name", "time")

    def __init__(self, name: str) -> None:
        self.name, self.time = name, 1
        self.knows: dict[Timeline, int] = {}
        self.host_time = 0
        """Up to which time of its host it has been told what the host knows."""
        self.in_graph = False
        """Whether something was computed on it that a backward goes back through."""

    def moment(self) -> Moment:
        """All that has been issued here so far, and what that comes after: what others can wait for."""
        now = {**self.knows, self: self.time}
        self.time += 1
        return now

    def wait(self, moment: Moment) -> None:
        """What is issued here from now on comes after ``moment``."""
        for other, time in moment.items():
            if other is not self and self.knows.get(other, 0) < time:
                self.knows[other] = time

    def is_after(self, other: Timeline, time: int) -> bool:
        """Whether what is issued here now comes after what ``other`` had issued at ``time``."""
        return other is self or self.knows.get(other, 0) >= time


Moment = Mapping[Timeline, int]


class Timelines:
    """Those of one rank: its host, its default stream, and those that are made."""

    def __init__(self) -> None:
        self.host = Timeline("the host")
        self.default = Timeline("the default stream")
        self.current = self.default
        self._streams = [self.default]
        self._groups: dict[object, Timeline] = {}

    def stream(self, made_at: str) -> Timeline:
        """A new stream; ``made_at``: the line that asked for it."""
        made = f", made at {made_at}" if made_at else ""
        self._streams.append(Timeline(f"stream {len(self._streams)}{made}"))
        return self._streams[-1]

    def of_group(self, key: object, name: str) -> Timeline:
        """The stream on which a process group runs its asynchronous calls."""
        if key not in self._groups:
            self._groups[key] = Timeline(f"the stream of group {name!r}")
        return self._groups[key]

    def launch(self, stream: Timeline) -> Timeline:
        """The stream, on which the host issues something: that comes after all that the host knows."""
        if stream.host_time != self.host.time:
            stream.wait({**self.host.knows, self.host: self.host.time})
            stream.host_time = self.host.time
        return stream

    def record(self, stream: Timeline) -> Moment:
        """What an event holds that is recorded on the stream now."""
        return self.launch(stream).moment()

    def block(self, moment: Moment) -> None:
        """The host waits for the moment; all that it issues later comes after it."""
        self.host.wait(moment)
        self.host.time += 1

    def block_for_all(self) -> None:
        """The host waits for all streams of its device."""
        for stream in (*self._streams, *self._groups.values()):
            self.host.wait(self.record(stream))
        self.host.time += 1

    def begin_backward(self) -> None:
        """The engine runs functions where its forward ran, in order with it; here, on the current one."""
        for stream in self._streams:
            if stream.in_graph and stream is not self.current:
                self.current.wait(self.record(stream))

    def end_backward(self) -> None:
        """The streams of the graph have taken part in the backward."""
        for stream in self._streams:
            if stream.in_graph and stream is not self.current:
                stream.wait(self.record(self.current))
