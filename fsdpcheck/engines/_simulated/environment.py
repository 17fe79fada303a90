"""Environments of simulated ranks: ``os.environ`` is each rank's own, and so is what C code and child processes read.

The dict behind ``os.environ`` is swapped by reference and notes what is written to it; of the process's environment in
C only what ranks have apart is written at a hand-over.
"""

from __future__ import annotations

import os
from typing import Any, Final

_RANK: Final = (b"RANK", b"LOCAL_RANK")
_WORLD: Final = (b"GROUP_RANK", b"WORLD_SIZE", b"LOCAL_WORLD_SIZE", b"MASTER_ADDR", b"MASTER_PORT")
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
    """What W ranks have: as torchrun starts them, and from then on what each has made of it."""

    def __init__(self, world_size: int) -> None:
        self._outside: dict[bytes, bytes] = _VIEWS[0]._data
        size = b"%d" % world_size
        world = dict(zip(_WORLD, (b"0", size, size, b"127.0.0.1", b"0"), strict=True))
        self._apart = set(_RANK)
        self._own = [self._fresh(rank, world) for rank in range(world_size)]
        for name, value in world.items():
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
        for name in (*self._apart, *_WORLD):
            _write(name, self._outside.get(name))

    def _fresh(self, rank: int, world: dict[bytes, bytes]) -> _Own:
        own = _Own({**self._outside, **world, **dict.fromkeys(_RANK, b"%d" % rank)})
        own.apart = self._apart
        return own


def _write(name: bytes, value: bytes | None) -> None:
    if value is None:
        os.unsetenv(name)
    else:
        os.putenv(name, value)
