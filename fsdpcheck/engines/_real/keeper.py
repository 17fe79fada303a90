"""What every torchrun process but rank 0's does: keep workers that are this rank, until the driver says leave.

A worker that hangs or dies takes its keeper not along, so torchrun sees nothing of it, and the next case has new ones.
"""

from __future__ import annotations

import math
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

from fsdpcheck.engines._real import launch, post, shared_table, stacks
from fsdpcheck.engines._real.contact import SILENCE_SECONDS
from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.mail import Mail
from fsdpcheck.engines._real.pool import end_of
from fsdpcheck.engines._real.transport import LocalLink
from fsdpcheck.processes import leftovers
from fsdpcheck.processes.limit import LOOK_SECONDS

_POLL_SECONDS: Final = 0.005
"""How often the keeper looks at the rows of workers that it tells another node of; no verdict depends on it."""
GRACE_SECONDS: Final = 20.0
"""How long a keeper that torchrun told to end waits for the driver, which tells what was found; torchrun waits 30 s."""
_TERMINATED: Final = 128 + signal.SIGTERM
_INTERRUPTED: Final = 130
"""What a keeper without a driver leaves with: as a session that was interrupted does."""


@dataclass
class Served:
    """What this keeper has done, for the file of its rank. ``processor_seconds``: of its workers.

    ``lost``: why there was no contact with the driver's node any more; "" where there was.
    """

    workers: int = 0
    replies: int = 0
    processor_seconds: float = 0.0
    ends: list[dict[str, Any]] = field(default_factory=list)
    lost: str = ""

    def ended(self, kept: _Kept, code: int, words: str) -> None:
        self.processor_seconds += kept.used
        self.ends.append({"pool": kept.pool, "exit_code": code, "wrote_last": words})


class _Kept:
    """One worker, and what the driver was told of it."""

    def __init__(self, start: post.Start, tell: Mail, served: Served) -> None:
        self.pool, self._post, self._served = start.pool, tell, served
        self._is_far, self.used = start.driver_node != launch.node(), 0.0
        self._place = self._own(start.place)
        self._table = shared_table.Table(self._place.table, start.place.world_size) if self._is_far else None
        self._told, self._looked = shared_table.Header(0, 0, 0, 0, ()), 0.0
        served.workers += 1
        self._link = LocalLink(self._place)
        tell.send(post.Started(self.pool, self._link.pid, start.place.folder.is_dir()))

    def _own(self, place: Place) -> Place:
        """The place of this rank, with a folder and a table of its own where rank 0's are on another node."""
        own = replace(place, rank=launch.rank(), address=launch.own_address(), on_node=launch.on_node())
        if self._is_far:
            own = replace(own, folder=Path(tempfile.mkdtemp(prefix=leftovers.folder_prefix())))
            shared_table.create(own.table, own.world_size)
        return own

    @property
    def sources(self) -> list[Any]:
        return self._link.sources()

    def send(self, payload: bytes) -> None:
        self._link.send(payload)

    def tell(self) -> bool:
        """Tell the driver what is new; whether the worker lives."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked, self.used = time.monotonic(), self._link.processor_seconds() or self.used
            if self._is_far:
                self._post.send(post.Life(self.pool, self.used, self._link.sleep()))
        code = self._link.exit_code()  # before what it sent: of a worker that has ended, that is all
        if self._table is not None:
            self._tell_row(self._table)
        while (payload := self._link.receive()) is not None:
            self._served.replies += 1
            self._post.send(post.Reply(self.pool, payload))
        if code is not None:
            self._end(code)
        return code is None

    def tell_stack(self) -> None:
        rank = self._place.rank
        found = stacks.collect(
            {rank: self._place.stack}, {rank: self._link.pid}, lambda _: self._link.exit_code() is None
        )
        self._post.send(post.Standing(self.pool, found[rank]))

    def end(self) -> None:
        """Kill the worker, and say so."""
        if self._link.exit_code() is None:
            self.used = self._link.processor_seconds() or self.used
        self._link.end()
        self._end(self._link.exit_code() or 0)

    def _end(self, code: int) -> None:
        words = end_of(self._place.stderr) if code not in (0, -signal.SIGKILL) else ""
        self._post.send(post.Ended(self.pool, code, words))
        self._served.ended(self, code, words)
        self._link.end()
        if self._is_far:
            shutil.rmtree(self._place.folder, ignore_errors=True)

    def _tell_row(self, table: shared_table.Table) -> None:
        header, again = (table.read()[self._place.rank] for _ in range(2))
        if header.stable and header == again and header != self._told:
            known = self._told.calls if header.run == self._told.run else 0
            calls = table.trace(self._place.rank, header)[known:]
            self._post.send(post.Moved(self.pool, header, calls))
            self._told = header


def serve(store: Any, driver: int | None, served: Served, patience: float = SILENCE_SECONDS) -> int:
    """Keep workers until the driver says leave, or is gone; returns the code to leave with.

    ``driver``: the process of rank 0, None where it is on another node: then a store that is silent for ``patience``
    seconds is lost, and the driver with it. ``served`` is filled meanwhile. SIGTERM, which torchrun sends to all ranks,
    is the driver's to answer: it tells what was found, then says leave.
    """
    mail, kept = Mail(store, launch.rank(), math.inf if driver else patience), dict[int, _Kept]()
    with _terminated() as until:
        while True:
            sources = [mail.source, *(source for one in kept.values() for source in one.sources)]
            connection.wait(sources, timeout=LOOK_SECONDS if driver or not kept else _POLL_SECONDS)
            for number, one in list(kept.items()):
                if not one.tell():
                    del kept[number]
            while (message := mail.take()) is not None:
                if isinstance(message, post.Leave):
                    return _left(mail, kept, message.code)
                _obey(message, kept, mail, served)
            served.lost = mail.lost()
            if served.lost:
                return _left(mail, kept, _INTERRUPTED)
            if until:
                mail.leave()
                if time.monotonic() > until[0] or (driver and not leftovers.is_living(driver)):
                    return _left(mail, kept, _TERMINATED)


def _left(mail: Mail, kept: dict[int, _Kept], code: int) -> int:
    """End all workers; returns the code."""
    while kept:
        kept.popitem()[1].end()
    mail.close()
    return code


def _obey(message: post.ToKeeper, kept: dict[int, _Kept], tell: Mail, served: Served) -> None:
    match message:
        case post.Start():
            kept[message.pool] = _Kept(message, tell, served)
        case post.Request() if message.pool in kept:
            kept[message.pool].send(message.payload)
        case post.AskStack() if message.pool in kept:
            kept[message.pool].tell_stack()
        case post.End() if message.pool in kept:
            kept.pop(message.pool).end()


@contextmanager
def _terminated() -> Iterator[list[float]]:
    """Holds, after SIGTERM, until when the driver is waited for."""
    until: list[float] = []
    before = signal.signal(signal.SIGTERM, lambda *_: until.append(time.monotonic() + GRACE_SECONDS))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    try:
        yield until
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
