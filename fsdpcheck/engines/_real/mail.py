"""A keeper's mail, carried by a thread of its own: a store that is silent for ever keeps no keeper from ending."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any, Final

from fsdpcheck.engines._real import post
from fsdpcheck.engines._real.contact import Signs, Silence
from fsdpcheck.engines._real.lifeline import Lifeline

_POLL_SECONDS: Final = 0.002
"""How often the store is asked for messages; no verdict depends on it."""
_LAST_SECONDS: Final = 5.0
"""How long the last messages may take to be carried."""


class Mail:
    """Takes messages of the driver, sends it those of the keeper, and gives the signs that this process is there.

    A call of the store waits without limit when the store's machine is cut off (TCPStore, whatever its time-out), so
    nobody else calls it. ``patience``: how long the store may be silent before contact is lost; for ever on the
    driver's own node, where the system tells of processes that end, and nobody holds a lifeline.
    """

    def __init__(self, store: Any, rank: int, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        far = Lifeline(store, rank) if math.isfinite(patience) else None
        self._post, self._signs, self._patience = post.Post(store, rank), Signs(store, rank, lifeline=far), patience
        self._out, self._in = deque[post.FromKeeper](), deque[post.ToKeeper]()
        self.source, self._bell = Pipe(duplex=False)
        """``source``: to be waited on (multiprocessing.connection.wait) for what there is to take."""
        self._has_rung = self._leaves = self._is_closed = False
        self._stir, self._trouble = threading.Event(), ""
        self._rounds, self._silence = 0, Silence(clock)
        self._thread = threading.Thread(target=self._carry, name="mail", daemon=True)
        self._thread.start()

    def send(self, message: post.FromKeeper) -> None:
        """Have the driver told. Never blocks."""
        self._out.append(message)
        self._stir.set()

    def take(self) -> post.ToKeeper | None:
        """The next message of the driver, if there is one. Never blocks."""
        if self.source.poll():
            self.source.recv_bytes()
            self._has_rung = False  # before the look: what comes behind it rings again
        return self._in.popleft() if self._in else None

    def leave(self) -> None:
        """Have the driver told, once, that torchrun has told this process to end."""
        self._leaves = True

    def lost(self) -> str:
        """Why there is no contact with the driver's node any more; "" while there is."""
        if self._trouble:
            return f"torchrun's store is gone: {self._trouble}"
        silent = self._silence.look(self._rounds) > self._patience
        return f"torchrun's store was silent for {self._patience:.0f} s" if silent else ""

    def close(self) -> None:
        """Carry what is left, if that is soon done, and nothing more."""
        self._is_closed = True
        self._stir.set()
        if not self.lost():
            self._thread.join(_LAST_SECONDS)

    def _carry(self) -> None:
        has_left = False
        try:
            while self._out or not self._is_closed:
                self._stir.clear()
                self._signs.give()
                if self._leaves and not has_left:
                    has_left = True
                    self._signs.leave()
                while self._out:
                    self._post.send(self._out.popleft(), self._signs.give)
                while (message := self._post.take()) is not None:
                    self._in.append(message)
                    self._ring()
                self._rounds += 1
                self._stir.wait(_POLL_SECONDS)
        except RuntimeError as error:  # the store's process has ended, or nothing leads to it
            self._trouble = str(error).partition("\n")[0]
            self._ring()

    def _ring(self) -> None:
        if not self._has_rung:
            self._has_rung = True
            self._bell.send_bytes(b"")
