"""Messages between the driver, in rank 0, and the keepers of torchrun's other ranks, through torchrun's own store.

A message lies in the store until it is taken. Whoever waits for messages asks for one number, so that waiting costs the
store one short question a look, however many ranks there are.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.shared_table import Header
from fsdpcheck.engines._real.stacks import Stack
from fsdpcheck.execution.trace import Trace
from fsdpcheck.processes import messages

_PIECE: Final = 1 << 22
"""Bytes of the largest value that is set at once: TCPStore (libuv) ends a connection that sends more than 8 MiB."""

_LOOK_SECONDS: Final = 0.004
"""From one look for news to the next: several ask for it at a time."""


@dataclass(frozen=True)
class Start:
    """To a keeper: start a worker there, of pool number ``pool``. ``place`` is rank 0's."""

    pool: int
    place: Place
    driver_node: int


@dataclass(frozen=True)
class Request:
    """To a keeper: give this to the worker."""

    pool: int
    payload: bytes


@dataclass(frozen=True)
class AskStack:
    """To a keeper: say where the worker stands."""

    pool: int


@dataclass(frozen=True)
class End:
    """To a keeper: kill the worker, if it lives, and reap it."""

    pool: int


@dataclass(frozen=True)
class Leave:
    """To a keeper: there is no more to do; leave with this code."""

    code: int


@dataclass(frozen=True)
class Started:
    """From a keeper: the worker is there. ``sees``: whether the driver's temporary folder is there as well."""

    pool: int
    pid: int
    sees: bool


@dataclass(frozen=True)
class Reply:
    """From a keeper: what the worker has sent."""

    pool: int
    payload: bytes


@dataclass(frozen=True)
class Ended:
    """From a keeper: the worker has ended with this code, and wrote last what ``words`` says."""

    pool: int
    code: int
    words: str


@dataclass(frozen=True)
class Standing:
    """From a keeper: where the worker stands."""

    pool: int
    stack: Stack


@dataclass(frozen=True)
class Moved:
    """From a keeper of another node: the worker's row is ``header`` now, and ``calls`` were added to its log."""

    pool: int
    header: Header
    calls: Trace


@dataclass(frozen=True)
class Life:
    """From a keeper of another node: what the worker has used up, and whether it sleeps (processes/limit.py)."""

    pool: int
    processor_seconds: float
    sleep: str


ToKeeper = Start | Request | AskStack | End | Leave
FromKeeper = Started | Reply | Ended | Standing | Moved | Life


class Post:
    """The keeper's side."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._sent = self._taken = 0

    def send(self, message: FromKeeper, between: Callable[[], None] = lambda: None) -> None:
        """Tell the driver. ``between`` is called behind each piece of what is long."""
        give(self._store, f"from {self._rank}/{self._sent}", messages.dumps(message), between)
        self._sent += 1
        self._store.add("news", 1)

    def take(self) -> ToKeeper | None:
        """The next message of the driver, if there is one."""
        if self._store.add(f"to {self._rank}", 0) <= self._taken:
            return None
        payload = taken(self._store, f"to {self._rank}/{self._taken}")
        assert payload is not None  # it was given before it was counted
        self._taken += 1
        message: ToKeeper = messages.loads(payload)
        return message


class StoreIsGone(KeyboardInterrupt):
    """torchrun's store is, and torchrun with it: the session is interrupted."""


class DriversStore:
    """torchrun's store, as the driver calls it: raises StoreIsGone when it is."""

    def __init__(self, store: Any) -> None:
        self._store, self.is_gone = store, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._called, getattr(self._store, name))

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # torch.distributed.DistNetworkError, of torch 2.4 and later
            self.is_gone = True
            raise StoreIsGone from error


class Office:
    """The driver's side: messages of all keepers, kept by rank and pool until somebody asks for them."""

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._news, self._looked = store, 0, 0.0
        self._sent, self._received = [0] * world_size, [0] * world_size
        self._waiting: dict[tuple[int, int], deque[FromKeeper]] = defaultdict(deque)

    def send(self, rank: int, message: ToKeeper) -> None:
        """Tell the keeper of ``rank``."""
        give(self._store, f"to {rank}/{self._sent[rank]}", messages.dumps(message))
        self._sent[rank] += 1
        self._store.add(f"to {rank}", 1)

    def send_last(self, rank: int, message: Leave) -> None:
        """Tell the keeper of ``rank`` behind whatever it has been told, by another office too."""
        self._sent[rank] = self._store.add(f"to {rank}", 0)
        self.send(rank, message)

    def look(self, rank: int, pool: int) -> deque[FromKeeper]:
        """What the keeper of ``rank`` has told of this pool and nobody has taken out yet, oldest first."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            news, self._looked = self._store.add("news", 0), time.monotonic()
            if news != self._news:
                self._news = news
                for other in range(len(self._received)):
                    self._fetch(other)
        return self._waiting[rank, pool]

    def _fetch(self, rank: int) -> None:
        while (payload := taken(self._store, f"from {rank}/{self._received[rank]}")) is not None:
            self._received[rank] += 1
            message: FromKeeper = messages.loads(payload)
            self._waiting[rank, message.pool].append(message)


def give(store: Any, key: str, payload: bytes, between: Callable[[], None] = lambda: None) -> None:
    """Set ``key`` to ``payload`` in pieces; the key itself says how many they are, and comes last."""
    pieces = [payload[start : start + _PIECE] for start in range(0, len(payload), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
        between()
    store.set(key, str(len(pieces)))


def taken(store: Any, key: str) -> bytes | None:
    """What was given as ``key``, which is removed, if it is there."""
    if not store.check([key]):
        return None
    names = [f"{key}/{number}" for number in range(int(store.get(key)))]
    payload = b"".join(bytes(store.get(name)) for name in names)
    for name in (key, *names):
        store.delete_key(name)
    return payload
