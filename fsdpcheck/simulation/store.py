"""The key-value store of simulated ranks: one dictionary, and waiting for a key is blocking like any other."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdpcheck.compat import frames_private
from fsdpcheck.execution.trace import Collective
from fsdpcheck.simulation.current_rank import current_rank, require_rank
from fsdpcheck.simulation.decisions import Access
from fsdpcheck.simulation.exchange import block
from fsdpcheck.simulation.scheduler import where
from fsdpcheck.simulation.store_looks import Looks
from fsdpcheck.simulation.turns import in_turn

if TYPE_CHECKING:
    from fsdpcheck.simulation.run import SimulatedRun


if TYPE_CHECKING:
    _Store = object
else:
    _Store = dist.Store


class SimulatedStore(_Store):
    """What c10d asks of a store, over memory. A ``get`` of an absent key blocks until another rank sets it.

    What a program does with it depends on the schedule in general, so it is noted in the run's voids, or decided when;
    what c10d does with it, to make groups, does not.
    """

    def __init__(self, run: Callable[[], SimulatedRun | None], looks: Looks | None = None) -> None:
        super().__init__()
        self._looks = looks or Looks()
        self._run, self._values = run, dict[str, bytes]()
        self._queues: dict[str, list[bytes]] = defaultdict(list)
        self._waiting: list[tuple[int, str]] = []
        self._others: dict[str, SimulatedStore] = {}

    def clear(self) -> None:
        """Forget the keys of the last run, and the other stores."""
        self._values.clear()
        self._queues.clear()
        self._others.clear()
        self._looks = Looks()

    def at(self, address: str) -> SimulatedStore:
        """The store that ranks have made themselves at this address."""
        return self._others.setdefault(address, SimulatedStore(self._run, self._looks))

    @in_turn
    def set(self, key: str, value: bytes | str) -> None:
        self._put(self._use("set", key), key, _encoded(value))

    @in_turn
    def get(self, key: str) -> bytes:
        self._wait("get", key, lambda: key in self._values)
        return self._values[key]

    @in_turn
    def add(self, key: str, amount: int) -> int:
        run = self._use("add", key)
        total = int(self._values.get(key, b"0")) + amount
        self._put(run, key, str(total).encode())
        return total

    @in_turn
    def append(self, key: str, value: bytes | str) -> None:
        run = self._use("append", key)
        self._put(run, key, self._values.get(key, b"") + _encoded(value))

    @in_turn
    def check(self, keys: list[str]) -> bool:
        """A poll: others run as far as they can before it is said that a key is not there."""
        runs = [self._use("check", key, writes=False) for key in keys]
        for run in runs[:1] if not all(key in self._values for key in keys) else ():
            run.baton.pause(require_rank())
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Nothing here takes time: with a time-out it waits, too, and that is no proof."""
        run = self._of_now()
        if timeout is not None and frames_private.is_a_program(sys._getframe(1).f_code.co_filename):
            run.voids.add(TIMED)
        for key in keys:
            self.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    @in_turn
    def delete_key(self, key: str) -> bool:
        self._use("delete_key", key)
        self._looks.changes += key in self._values
        return self._values.pop(key, None) is not None

    @in_turn
    def num_keys(self) -> int:
        self._use("num_keys", _ALL, writes=False)
        return len(self._values)

    @in_turn
    def list_keys(self) -> list[str]:
        self._use("list_keys", _ALL, writes=False)
        return list(self._values)

    getNumKeys, deleteKey = num_keys, delete_key  # what C++ calls them

    @in_turn
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set ``desired`` where the value is ``expected``, or where there is none and "" is; the value then."""
        run, wanted, put = self._use("compare_set", key), _encoded(expected), _encoded(desired)
        now = self._values.get(key)
        if now == wanted or (now is None and not wanted):
            self._put(run, key, put)
            return put
        return wanted if now is None else now

    @in_turn
    def queue_push(self, key: str, value: bytes | str) -> None:
        run = self._use("queue_push", key)
        self._queues[key].append(_encoded(value))
        self._looks.changes += 1
        self._tell(run, key)

    @in_turn
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """The first of a queue. Raises dist.QueueEmptyError where there is none and ``block`` is False."""
        queue = self._queues[key]
        if block:
            self._wait("queue_pop", key, lambda: bool(queue), writes=True)
        elif not queue:
            self._use("queue_pop", key).baton.pause(require_rank())
        if not queue:
            raise dist.QueueEmptyError(f"queue {key} is empty")
        self._looks.changes += 1
        return queue.pop(0)

    @in_turn
    def queue_len(self, key: str) -> int:
        self._use("queue_len", key, writes=False)
        return len(self._queues[key])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here takes time; a program that asks for it may count on it all the same."""
        run = self._run()
        if run is not None and frames_private.is_a_program(sys._getframe(1).f_code.co_filename):
            run.voids.add(TIMED)

    def _put(self, run: SimulatedRun, key: str, value: bytes) -> None:
        self._looks.changes += self._values.get(key) != value
        self._values[key] = value
        self._tell(run, key)

    def _tell(self, run: SimulatedRun, key: str) -> None:
        """Let go on who waits for a key."""
        told = [waiting for waiting in self._waiting if waiting[1] == key]
        self._waiting = [waiting for waiting in self._waiting if waiting not in told]
        for rank, _ in told:
            run.baton.wake(rank)

    def _wait(self, what: str, key: str, there: Callable[[], bool], *, writes: bool = False) -> None:
        """Block until it is there, and use it then."""
        run, rank = self._of_now(), require_rank()
        while True:
            while not there():
                call = Collective(f"store.{what}", tuple(run.traces), "store", 0, subject=f"key {_own(key)!r}")
                self._waiting.append((rank, key))
                block(run, rank, call, there)
            self._use(what, key, writes=writes)
            if there():  # or another has taken it meanwhile
                return

    def _use(self, what: str, key: str, *, writes: bool = True) -> SimulatedRun:
        """Before a program uses a key: that is one order of many, or it is decided when."""
        run, rank = self._of_now(), current_rank()
        if rank is None:
            return run
        shared = ("store", id(self), key)
        if frames_private.is_called_to_make_groups(sys._getframe(2)):
            if run.heard is not None:
                run.heard.hear(rank, shared, writes=writes)
            return run
        if run.decisions is None or key is _ALL:  # which depends on every key
            run.voids.add(f"store.{what} was used after init")
        access = Access(rank, shared, writes, where(sys._getframe(2)))
        self._looks.look(run, f"store.{what} of {_own(key)!r}", access)
        if run.decisions is not None:
            run.decisions.wait_for(rank, f"store.{what} of {_own(key)!r}", access, run.baton)
        elif run.heard is not None:
            run.heard.hear(rank, shared, writes=writes)
        return run

    def _of_now(self) -> SimulatedRun:
        run = self._run()
        assert run is not None, "the store is used outside a run"
        return run


_ALL = "//all keys"
TIMED = "a rank waited with a time-out, which nothing here takes"


def _own(key: str) -> str:
    """A key as the program wrote it, without what torch puts before it."""
    return key.rpartition("//")[2]


def _encoded(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
