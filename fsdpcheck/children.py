"""Child processes that run a worker's main: their events as they come, and their death. Imports no torch."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

_STDERR: Final = 2
_CHUNK: Final = 1 << 16
_BOOT: Final = """import json, sys
sys.path[:] = json.loads(sys.argv.pop())
try:
    from fsdpcheck.worker import {main}
    sys.exit({main}())
except KeyboardInterrupt:  # before the worker listens for it
    sys.exit(130)"""
# Not ``-m``, which looks in the working folder first: in a checkout it would run another copy than the installed one.

Event = dict[str, Any]


class Child:
    """A process that runs ``worker.<main>`` with the file descriptors of two pipes and ``arguments``.

    Events come as lines of JSON from the one; ``give`` sends lines of JSON through the other.
    """

    def __init__(self, number: int, main: str, arguments: Sequence[str]) -> None:
        self.number = number
        self.ended = False
        """Did it say that it is done? Otherwise the end of its pipe is its death."""
        self.pipe, write = os.pipe()
        read, self._feed = os.pipe()
        self._rest = b""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", _BOOT.format(main=main), str(write), str(read)),
                *(*arguments, json.dumps(sys.path)),
            ],
            pass_fds=[write, read],
            stdout=_STDERR,  # what an implementation prints is not our answer
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        os.close(write)
        os.close(read)

    def give(self, data: object) -> None:
        """Send ``data``; to a dead child it goes nowhere, for its death is seen at its pipe."""
        with suppress(BrokenPipeError):
            os.write(self._feed, json.dumps(data).encode() + b"\n")

    def dismiss(self) -> None:
        """Nothing more will be sent."""
        if self._feed >= 0:
            os.close(self._feed)
            self._feed = -1

    def read(self) -> list[Event] | None:
        """The events that are here, once there is something to read; None at the end of the pipe."""
        chunk = os.read(self.pipe, _CHUNK)
        if not chunk:  # what is left in _rest is half a line of a child that died
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def death(self) -> str:
        """Wait for its end and tell it in words."""
        self.dismiss()
        os.close(self.pipe)
        code = self.process.wait()
        if code >= 0:
            return f"it exited with code {code} (os._exit, or a library that ends the process)"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"


class Crew:
    """The children that are running now, and whether the user asked to stop."""

    def __init__(self) -> None:
        self.interrupted = False
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._started = 0

    def start(self, main: str, arguments: Sequence[str]) -> Child:
        """Start a child; numbers begin at 0 and are never used again."""
        child = Child(self._started, main, arguments)
        self._started += 1
        self._children.append(child)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)
        return child

    def told(self) -> Iterator[tuple[Child, Event | str]]:
        """Events of all children as they come, and for each at last its death in words, until none is left."""
        while self._children:
            for key, _ in self._selector.select():
                child: Child = key.data
                events = child.read()
                if events is None:
                    self._selector.unregister(child.pipe)
                    self._children.remove(child)
                    yield child, child.death()
                else:
                    yield from ((child, event) for event in events)

    def interrupt(self, number: int, frame: object) -> None:
        """First time: ask the children to clean up and end. Second time: end them."""
        for child in self._children:
            child.process.send_signal(signal.SIGKILL if self.interrupted else signal.SIGINT)
        self.interrupted = True

    @staticmethod
    @contextmanager
    def forwarding_interrupts() -> Iterator[Crew]:
        """A crew that SIGINT and SIGTERM are passed on to. Who is still running when it is left, is ended."""
        crew = Crew()
        kept = {number: signal.signal(number, crew.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield crew
        finally:
            for child in crew._children:
                child.process.kill()
                child.death()
            crew._selector.close()
            for number, handler in kept.items():
                signal.signal(number, handler)
