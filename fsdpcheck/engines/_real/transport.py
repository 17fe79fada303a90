"""Link: how the driver of real ranks reaches one of them. A link to a worker of this process is a pipe."""

from __future__ import annotations

import signal
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from fsdpcheck import adapters
from fsdpcheck.engines._real.follower import Place, serve
from fsdpcheck.processes import fork_server, leftovers
from fsdpcheck.processes.limit import processor_seconds, sleep_of


class Link(Protocol):
    """One worker as its driver sees it."""

    is_near: bool
    """Whether it is on this node, where its files and the system tell of it."""

    @property
    def pid(self) -> int: ...

    def send(self, payload: bytes) -> None:
        """Give it a request. A worker that has died meanwhile is no error here: ``exit_code`` tells."""

    def receive(self) -> bytes | None:
        """What it has sent, if anything. Never blocks."""

    def exit_code(self) -> int | None:
        """None while it lives; negative: minus the signal that killed it."""

    def last_words(self, written: Path) -> str | None:
        """What it wrote last, where somebody tells that; None where the file ``written`` does."""

    def processor_seconds(self) -> float:
        """Processor time that it has used so far."""

    def sleep(self) -> str:
        """Something that is the same twice only if it slept in between."""

    def sources(self) -> list[Any]:
        """What to wait on for news of it (multiprocessing.connection.wait); may be empty."""

    def end(self) -> None:
        """Kill it, if it lives, with the processes it has forked, and reap it. May be called twice."""


class LocalLink:
    """A worker started by this process. ``start_method``: see ProcessesEngine.

    A built-in ``adapter`` is imported before the first worker is forked, so that each does not import it again (Opacus:
    5 s). What runs from then on is the server of the first link.
    """

    is_near = True

    def __init__(self, place: Place, start_method: str = "forkserver", adapter: str = "") -> None:
        is_forked = start_method == "forkserver"
        context: Any = fork_server.context(adapters.modules_of(adapter)) if is_forked else get_context(start_method)
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._worker = context.Process(target=serve, args=(place, theirs), name=f"rank {place.rank}", daemon=True)
        with fork_server.without_main():
            self._worker.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._worker.pid)

    def send(self, payload: bytes) -> None:
        try:
            self._pipe.send_bytes(payload)
        except ConnectionError:
            self._worker.join()

    def receive(self) -> bytes | None:
        try:
            return self._pipe.recv_bytes() if self._pipe.poll() else None
        except (EOFError, ConnectionError):
            return None

    def exit_code(self) -> int | None:
        code: int | None = self._worker.exitcode
        if code is None and connection.wait([self._worker.sentinel], 0):
            code = self._worker.exitcode  # it has ended since; None still if another has reaped it
            return -signal.SIGKILL if code is None else code
        return code

    def last_words(self, written: Path) -> str | None:
        return None

    def processor_seconds(self) -> float:
        return processor_seconds(self.pid)

    def sleep(self) -> str:
        return sleep_of(f"/proc/{self.pid}/task/{self.pid}")

    def sources(self) -> list[Any]:
        return [self._pipe, self._worker.sentinel]

    def end(self) -> None:
        self._worker.kill()
        leftovers.end_group(self.pid)
        self._worker.join()
        self._pipe.close()
