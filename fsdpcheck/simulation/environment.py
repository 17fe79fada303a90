"""Environments of simulated ranks: ``os.environ`` is each rank's own, and so is what C code and child processes read.

The dict behind ``os.environ`` is swapped by reference and notes what is written to it; of the process's environment in
C only what ranks have apart is written at a hand-over.
"""

from __future__ import annotations

import os
from typing import Any, Final

_OF_RANK: Final = (b"RANK", b"LOCAL_RANK", b"ROLE_RANK", b"GROUP_RANK")
_OF_ALL: Final = (b"WORLD_SIZE", b"ROLE_WORLD_SIZE", b"LOCAL_WORLD_SIZE", b"GROUP_WORLD_SIZE")
_CONSTANT: Final = {
    b"ROLE_NAME": b"default",
    b"MASTER_ADDR": b"127.0.0.1",
    b"MASTER_PORT": b"29500",
    b"TORCHELASTIC_RESTART_COUNT": b"0",
    b"TORCHELASTIC_MAX_RESTARTS": b"0",
    b"TORCHELASTIC_RUN_ID": b"none",
    b"TORCHELASTIC_USE_AGENT_STORE": b"False",
}
_VIEWS: Final[tuple[Any, ...]] = (os.environ, os.environb)
"""What programs know the environment by; both read and write one dict of encoded names and values (CPython)."""


class _Own(dict[bytes, bytes]):
    """One rank's environment; every name that a rank writes is noted in ``apart``."""

    __slots__ = ("apart",)
    apart: set[bytes]

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self.apart.add(name)
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: bytes) -> None:
        self.apart.add(name)
        dict.__delitem__(self, name)


class Environments:
    """What W ranks of ``told`` have: as torchrun starts them, ``per_node`` on a node, and then what each made of it."""

    def __init__(self, world_size: int, per_node: int, told: int) -> None:
        self._outside: dict[bytes, bytes] = _VIEWS[0]._data
        nodes = -(-told // per_node)
        sizes = dict(zip(_OF_ALL, (b"%d" % n for n in (told, told, per_node, nodes)), strict=True))
        self._world = {**_CONSTANT, **sizes}
        self._apart = set(_OF_RANK)
        self._own = [self._fresh(rank, per_node) for rank in range(world_size)]
        for name, value in self._world.items():
            os.putenv(name, value)

    def enter(self, rank: int) -> None:
        own = self._own[rank]
        for view in _VIEWS:
            view._data = own
        for name in self._apart:
            _write(name, own.get(name))

    def restore(self) -> None:
        """Put back what the process had before the run."""
        for view in _VIEWS:
            view._data = self._outside
        for name in (*self._apart, *self._world):
            _write(name, self._outside.get(name))

    def _fresh(self, rank: int, per_node: int) -> _Own:
        numbers = (b"%d" % number for number in (rank, rank % per_node, rank, rank // per_node))
        own = _Own({**self._outside, **self._world, **dict(zip(_OF_RANK, numbers, strict=True))})
        own.apart = self._apart
        return own


def _write(name: bytes, value: bytes | None) -> None:
    if value is None:
        os.unsetenv(name)
    else:
        os.putenv(name, value)
