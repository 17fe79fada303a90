"""What a rank does to its process, of which it is only a thread here: exit handlers, numbers, processes it starts.

``threading.main_thread`` is the rank's own thread; signals are those of signals.py; ``atexit`` functions run when the
rank's program has ended, in reverse; a child that is a rank runs as this one (launchers.py), and any other forked child
ends where the rank's program does; ``os.getpid`` is the system's number of the rank's own thread, so that files which
are named by it are apart.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from fsdpcheck.compat import frames_private
from fsdpcheck.compat.torch_private import replaced
from fsdpcheck.simulation.current_rank import current_rank
from fsdpcheck.simulation.programs.launchers import Launched
from fsdpcheck.simulation.programs.signals import RankSignals

_CRASHED: Final = 1


class RankProcesses:
    """What W ranks have set of their processes."""

    def __init__(self, world_size: int) -> None:
        self._launched, self._process = Launched(world_size), os.getpid()
        self._signals = RankSignals(self._number)
        self._threads: dict[int, threading.Thread] = {}
        self._at_exit: dict[int, list[tuple[Callable[..., Any], Any, Any]]] = defaultdict(list)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, functions of the whole process that a rank calls are about that rank alone."""
        with (
            self._signals.in_place(),
            replaced(atexit, register=self._register(atexit.register), unregister=self._unregister(atexit.unregister)),
            replaced(threading, main_thread=self._main_thread(threading.main_thread)),
            replaced(os, getpid=self._getpid(os.getpid)),
            self._launched.in_place(),
        ):
            yield

    def run(self, rank: int, program: Callable[[], Any]) -> Any:
        """The program of a rank, and after it what it has left to its exit; what the program returns.

        ``sys.exit`` without a code ends it well."""
        self._threads[rank] = threading.current_thread()
        try:
            try:
                return program()
            except SystemExit as error:
                if error.code in (None, 0):
                    return None
                if not isinstance(error.code, int):
                    print(error.code, file=sys.stderr)  # as Python does
                raise
            finally:
                while self._at_exit[rank]:
                    function, args, options = self._at_exit[rank].pop()
                    function(*args, **options)
        finally:
            if os.getpid() != self._process:
                _end_child()

    def _register(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            rank = current_rank()
            if rank is None:
                return real(function, *args, **options)
            self._at_exit[rank].append((function, args, options))
            return function

        return ours

    def _unregister(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(function: Callable[..., Any]) -> None:
            rank = current_rank()
            if rank is None:
                real(function)
            else:
                self._at_exit[rank] = [entry for entry in self._at_exit[rank] if entry[0] != function]

        return ours

    def _main_thread(self, real: Callable[[], threading.Thread]) -> Callable[[], threading.Thread]:
        def ours() -> threading.Thread:
            rank = current_rank()
            return real() if rank is None else self._threads[rank]

        return ours

    def _getpid(self, real: Callable[[], int]) -> Callable[[], int]:
        """Python and torch compare numbers of processes, and are told the true one."""

        def ours() -> int:
            rank = current_rank()
            if rank is None or not frames_private.is_a_program(sys._getframe(1).f_code.co_filename):
                return real()
            return self._number(rank)

        return ours

    def _number(self, rank: int) -> int:
        return self._threads[rank].native_id or self._process


def _end_child() -> None:
    """End a forked child of a rank where its program has ended, as its process would; nothing of ours goes on in it."""
    error = sys.exception() if sys.version_info >= (3, 11) else None
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = _CRASHED
    sys.stdout.flush()
    os._exit(code)
