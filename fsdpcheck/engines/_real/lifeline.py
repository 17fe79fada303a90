"""A connection from each keeper of another node to the driver, which the system closes when the keeper's process ends.

Nothing is sent over it once it is made, so it ends for no other reason, and a process that is killed (for memory, say)
is known to have ended at once. Where none can be made, silence alone tells (``contact``).
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from typing import Any, Final

_KEY: Final = "lifelines"
_TOKEN: Final = 16
"""Bytes that a keeper shows it belongs to this session with; its rank follows in four."""
_CONNECT_SECONDS: Final = 5.0
"""How long a keeper tries, once. What does not answer is behind a firewall; no verdict depends on it."""


class Lifelines:
    """The driver's ends. ``host``: where others reach this node; no other address is listened at."""

    def __init__(self, store: Any, host: str) -> None:
        self._token, self._lines = secrets.token_bytes(_TOKEN), dict[int, socket.socket]()
        self._strangers: list[socket.socket] = []
        self._listener: socket.socket | None = None
        with suppress(OSError):  # the name means another machine here
            self._listener = socket.create_server((host, 0))
            self._listener.setblocking(False)
            store.set(_KEY, f"{host} {self._listener.getsockname()[1]} {self._token.hex()}")

    def ended(self) -> tuple[int, ...]:
        """Ranks whose process has ended since the last look. Never blocks."""
        self._accept()
        over = [rank for rank, line in self._lines.items() if _received(line, 1) == b""]
        for rank in over:
            self._lines.pop(rank).close()
        return tuple(over)

    def close(self) -> None:
        """Let go of all."""
        for one in (self._listener, *self._lines.values(), *self._strangers):
            if one is not None:
                one.close()

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                line, _ = self._listener.accept()
            except OSError:  # nobody waits
                break
            line.setblocking(False)
            self._strangers.append(line)
        for line in [*self._strangers]:
            said = _received(line, _TOKEN + 4)
            if said is None:  # it has said nothing yet
                continue
            self._strangers.remove(line)
            if len(said) == _TOKEN + 4 and secrets.compare_digest(said[:_TOKEN], self._token):
                self._lines[int.from_bytes(said[_TOKEN:], "big")] = line
            else:
                line.close()


class Lifeline:
    """The keeper's end."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._has_tried = store, rank, False
        self._line: socket.socket | None = None

    def hold(self) -> None:
        """Connect, once, as soon as the driver listens. May take _CONNECT_SECONDS."""
        if self._has_tried or not self._store.check([_KEY]):
            return
        self._has_tried = True
        host, port, token = bytes(self._store.get(_KEY)).decode().split()
        with suppress(OSError):
            self._line = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            self._line.sendall(bytes.fromhex(token) + self._rank.to_bytes(4, "big"))


def _received(line: socket.socket, most: int) -> bytes | None:
    """What has come, b"" if the other end is closed, None if nothing has."""
    try:
        return line.recv(most)
    except BlockingIOError:
        return None
    except OSError:  # it was reset
        return b""
