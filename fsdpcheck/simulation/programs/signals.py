"""Signals of ranks: what each has set for them, and what one does to a rank that sends it to itself.

A handler is remembered and not put in place. A signal that a rank sends itself calls the rank's handler, or ends that
rank as it would end its process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from fsdpcheck.compat.torch_private import replaced
from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.simulation.current_rank import current_rank

_NOTHING: Final = {"SIGCHLD", "SIGURG", "SIGWINCH", "SIGCONT"}
_STOPS: Final = {"SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
"""Names of the signals that by default do nothing, and that stop a process, which other systems may lack."""


class RankSignals:
    """``number``: of the process that a rank takes itself for."""

    def __init__(self, number: Callable[[int], int]) -> None:
        self._number, self._process = number, os.getpid()
        self._handlers: dict[int, dict[int, Any]] = defaultdict(dict)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, functions of signals that a rank calls are about that rank alone."""
        raising = self._raise_signal(signal.raise_signal)
        with (
            replaced(signal, signal=self._signal(signal.signal), getsignal=self._getsignal(signal.getsignal)),
            replaced(signal, raise_signal=raising),
            replaced(os, kill=self._kill(os.kill)),
        ):
            yield

    def _here(self) -> int | None:
        """The rank that calls; None in a child that it has forked."""
        return current_rank() if os.getpid() == self._process else None

    def _signal(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(number: int, handler: Any) -> Any:
            rank = self._here()
            if rank is None:
                return real(number, handler)
            before = self._handlers[rank].get(int(number), signal.SIG_DFL)
            self._handlers[rank][int(number)] = handler
            return before

        return ours

    def _getsignal(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(number: int) -> Any:
            rank = self._here()
            return real(number) if rank is None else self._handlers[rank].get(int(number), real(number))

        return ours

    def _raise_signal(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def ours(number: int) -> None:
            rank = self._here()
            if rank is None:
                real(number)
            else:
                self._receive(rank, number)

        return ours

    def _kill(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def ours(process: int, number: int) -> None:
            rank = self._here()
            if rank is None or process not in (self._number(rank), self._process):
                real(process, number)
            elif number:
                self._receive(rank, number)

        return ours

    def _receive(self, rank: int, number: int) -> None:
        """Raises what ends the rank, where its process would end."""
        handler, name = self._handlers[rank].get(int(number), signal.SIG_DFL), signal.Signals(number).name
        if callable(handler):
            handler(int(number), sys._getframe(2))
        elif handler is signal.SIG_IGN or name in _NOTHING:
            return
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif name in _STOPS:
            raise NotSupported(explain(f"a simulated rank cannot be stopped by {name}", then="run on real ranks"))
        else:
            os._exit(-int(number))
