"""The key-value store of simulated ranks: one dictionary, and waiting for a key is blocking like any other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fsdpcheck.engines._simulated.rendezvous import current_rank, require_rank
from fsdpcheck.engines._simulated.turns import in_turn
from fsdpcheck.errors import NotSupported
from fsdpcheck.execution.trace import Collective

if TYPE_CHECKING:
    from fsdpcheck.engines._simulated.run import SimulatedRun


if TYPE_CHECKING:
    _Store = object
else:
    _Store = dist.Store


class SimulatedStore(_Store):
    """What c10d asks of a store, over memory. A ``get`` of an absent key blocks until another rank sets it.

    Any use after the groups are initialised is schedule-dependent in general, so it is noted in the run's voids.
    """

    def __init__(self, run: Callable[[], SimulatedRun | None]) -> None:
        super().__init__()
        self._run, self._values = run, dict[str, bytes]()
        self._waiting: dict[int, str] = {}

    def clear(self) -> None:
        """Forget the keys of the last run."""
        self._values.clear()

    @in_turn
    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        run = self._note("set")
        for rank in [rank for rank, wanted in self._waiting.items() if wanted == key]:
            del self._waiting[rank]
            run.baton.wake(rank)

    @in_turn
    def get(self, key: str) -> bytes:
        run, rank = self._note("get"), require_rank()
        while key not in self._values:
            self._waiting[rank] = key
            run.blocked_in[rank] = Collective("store.get", tuple(run.traces), "store", 0, subject=f"key {key!r}")
            run.baton.block(rank)
            del run.blocked_in[rank]
        return self._values[key]

    @in_turn
    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    @in_turn
    def check(self, keys: list[str]) -> bool:
        self._note("check")
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def delete_key(self, key: str) -> bool:
        self._note("delete_key")
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        raise NotSupported("the store of simulated ranks has no compare_set; use set, get, add, wait or check")

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here takes time."""

    def _note(self, what: str) -> Any:
        run = self._run()
        assert run is not None, "the store is used outside a run"
        if current_rank() in run.initialised:
            run.voids.add(f"store.{what} was used after init")
        return run
