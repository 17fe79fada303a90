"""Child processes that run a worker's main: their events as they come, and their death. Imports no torch.

A child is over when it has ended, whoever still holds its pipe open; then all that it has started is ended too.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from fsdpcheck.processes import leftovers, zygote
from fsdpcheck.processes.limit import TIMES_THE_LONGEST, Limit, limit_seconds
from fsdpcheck.processes.watch import MORE_THAN_A_RUN, STACKS, Watch

_CHUNK: Final = 1 << 16
_BOOT: Final = """import faulthandler, json, sys
faulthandler.register({number}, {stacks})
sys.path[:] = json.loads(sys.argv.pop())
try:
    from fsdpcheck.session.worker import leave, {main}
    leave({main}())
except KeyboardInterrupt:  # before the worker listens for it
    sys.exit(130)"""
# Not ``-m``, which looks in the working folder first: in a checkout it would run another copy than the installed one.

_LOOK_SECONDS: Final = 5.0
"""From one look at what a child has used up to the next."""
_WHOLE_REPLAY: Final = 100.0
"""How much more than a run a replay may use up, which looks for the cause and tells nothing until it is done."""
_LEAVING_SECONDS: Final = 10.0
"""How long a child that has said its last word may take to end by itself; no verdict depends on it."""

Event = dict[str, Any]


class Stopped(str):
    """The end of a child that was ended because it never came back, in words."""


class Child:
    """A process that runs ``worker.<main>`` with the file descriptors of two pipes and ``arguments``.

    Events come as lines of JSON from the one; ``give`` sends lines of JSON through the other.
    """

    def __init__(self, number: int, main: str, arguments: Sequence[str], mark: str = "") -> None:
        self.number = number
        self.ended = False
        """Did it say that it is done? Otherwise its end is its death."""
        self.silent = False
        """Is there nothing more to read from it?"""
        self.idle = False
        """Does it wait for work that there is not yet?"""
        self.pipe, write = os.pipe()
        os.set_blocking(self.pipe, False)
        read, self._feed = os.pipe()
        self._rest, self._mark, self._last_word = b"", mark, float("inf")
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed at its death, as is the next
        self._beats = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = zygote.start(
            self._boot(main),
            [*map(str, (write, read, self._beats.fileno())), *arguments, json.dumps(sys.path)],
            [write, read, self._stacks.fileno(), self._beats.fileno()],
            mark,
        )
        self.exit = _exit_of(self.process)
        """A file descriptor that can be read once the process has ended."""
        os.close(write)
        os.close(read)

    def _boot(self, main: str) -> str:
        return _BOOT.format(main=main, number=int(STACKS), stacks=self._stacks.fileno())

    def watched(self, limit: Limit) -> None:
        """Begin anew to count what it uses up."""
        self._limit = limit
        self.watch = Watch(self.process.pid, limit, self._beats.fileno(), self._stacks.fileno(), _LOOK_SECONDS)

    def never_came_back(self) -> str:
        """Why it should be ended, with its stacks; "" while it may go on."""
        return "" if self.idle else self.watch.never_came_back()

    def give(self, data: object) -> None:
        """Send ``data``; to a dead child it goes nowhere, for its death is seen at its pipe."""
        self.idle = False
        self.watched(self._limit)
        with suppress(BrokenPipeError):
            os.write(self._feed, json.dumps(data).encode() + b"\n")

    def dismiss(self) -> None:
        """Nothing more will be sent."""
        if self._feed >= 0:
            os.close(self._feed)
            self._feed = -1

    def read(self) -> list[Event]:
        """The events that are here. Never blocks."""
        told = b""
        with suppress(BlockingIOError):
            while not self.silent:
                chunk = os.read(self.pipe, _CHUNK)
                self.silent = not chunk
                told += chunk
        *lines, self._rest = (self._rest + told).split(b"\n")  # half a line, in the end, is of a child that died
        return [json.loads(line) for line in lines]

    def leaves(self) -> None:
        """It has said its last word, and should be gone soon."""
        self._last_word = min(self._last_word, time.monotonic())

    @property
    def patience(self) -> float | None:
        """Seconds that it still has to end by itself; None while it need not end."""
        left = self._last_word + _LEAVING_SECONDS - time.monotonic()
        return None if left == float("inf") else max(left, 0.0)

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.exit, select.POLLIN)
        return bool(poll.poll(0))

    def death(self, known: frozenset[int] | None = None) -> str:
        """End it and all that it has started, and tell its end in words. ``known``: see leftovers.clear."""
        had_ended = self.has_ended
        leftovers.clear(self.process.pid, self._mark, known)  # before the pipe closes, which it would follow by itself
        code = self.process.wait()
        self.dismiss()
        for source in (self.pipe, self.exit):
            os.close(source)
        self._stacks.close()
        self._beats.close()
        if not had_ended:
            return "it closed its pipe to this process, and did not end"
        if code >= 0:
            return f"it exited with code {code} (os._exit, or a library that ends the process)"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"


def _exit_of(process: zygote.Process) -> int:
    """A file descriptor that can be read once ``process`` has ended."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(process.pid)
    read, write = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(write)

    threading.Thread(target=wait, name="watch child", daemon=True).start()
    return read


class Crew:
    """The children that are running now, and whether the user asked to stop.

    ``adopts``: whether orphans that come to this process are taken for theirs. Where it starts others meanwhile, as a
    process that runs a user's tests does, nobody could tell them apart.
    """

    def __init__(self, adopts: bool = True) -> None:
        self.interrupted = False
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._started = 0
        self._mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self._zygote = zygote.ready()
        self._others = leftovers.children() if adopts else None
        self._limit = Limit(MORE_THAN_A_RUN * limit_seconds(), MORE_THAN_A_RUN * TIMES_THE_LONGEST)

    def start(self, main: str, arguments: Sequence[str]) -> Child:
        """Start a child; numbers begin at 0 and are never used again."""
        child = Child(self._started, main, arguments, f"{self._mark}.{self._started}")
        self._started += 1
        self._children.append(child)
        for source in (child.pipe, child.exit):
            self._selector.register(source, selectors.EVENT_READ, child)
        child.watched(self._limit if main == "main" else Limit(_WHOLE_REPLAY * limit_seconds()))
        if self.interrupted:  # while it was being started
            child.process.send_signal(signal.SIGINT)
        return child

    def told(self) -> Iterator[tuple[Child, Event | str]]:
        """Events of all children as they come, and for each at last its death in words, until none is left.

        A child that never came back is ended, and its words are Stopped. What a dead child has started is dead.
        """
        while self._children:
            for child in {key.data: None for key, _ in self._selector.select(self._patience())}:
                has_ended = child.has_ended  # before reading: nothing comes after it
                was_silent = child.silent
                events = child.read()
                if events and events[0]["event"] != "plan":  # before it torch is imported: that is no measure
                    self._limit.learn(child.watch.seconds)
                if events:
                    child.watched(self._limit)
                yield from ((child, event) for event in events)
                if child.silent and not was_silent:
                    self._selector.unregister(child.pipe)
                if child.silent or child.ended:
                    child.leaves()
                if has_ended:
                    yield child, self._bury(child)
            for child in [child for child in self._children if child.patience == 0.0]:
                yield child, self._bury(child)
            for child, why in [(child, why) for child in self._children if (why := child.never_came_back())]:
                self._bury(child)
                yield child, Stopped(why)

    def interrupt(self, number: int, frame: object) -> None:
        """First time: ask the children to clean up and end. Second time: end them."""
        if self._zygote is not None:
            self._zygote.interrupt()
        for child in self._children:
            child.process.send_signal(signal.SIGKILL if self.interrupted else signal.SIGINT)
        self.interrupted = True

    def _patience(self) -> float:
        return min([_LOOK_SECONDS, *(child.patience for child in self._children if child.patience is not None)])

    def _bury(self, child: Child) -> str:
        for source in (child.exit, *([] if child.silent else [child.pipe])):
            self._selector.unregister(source)
        self._children.remove(child)
        others = None if self._others is None else self._others | {other.process.pid for other in self._children}
        return child.death(others)

    def close(self) -> None:
        """End who is still running."""
        for child in list(self._children):
            self._bury(child)
        self._selector.close()

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """SIGINT and SIGTERM are passed on to the children."""
        kept = {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    @staticmethod
    @contextmanager
    def forwarding_interrupts() -> Iterator[Crew]:
        """A crew that SIGINT and SIGTERM are passed on to. Who is still running when it is left, is ended."""
        leftovers.remove_abandoned()
        with leftovers.adopting():
            crew = Crew()
            with crew.hearing():
                try:
                    yield crew
                finally:
                    crew.close()
