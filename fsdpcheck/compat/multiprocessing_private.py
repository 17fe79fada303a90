"""What multiprocessing keeps private: its fork server as a fork of this process. Tried on Python 3.11; 3.12 was read.

multiprocessing starts the server as a new program, which imports everything once more.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from typing import Any, NoReturn


@contextmanager
def server_by_fork() -> Iterator[None]:
    """A fork server that is started within it is a fork of this process, which may have no other thread."""
    resource_tracker.ensure_running()  # before: it is started by the same function
    private: Any = util
    kept = private.spawnv_passfds
    private.spawnv_passfds = _fork
    try:
        yield
    finally:
        private.spawnv_passfds = kept


def _fork(program: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """As util.spawnv_passfds, for ``python -c COMMAND``: the number of a process that runs the command."""
    gc.collect()
    gc.freeze()  # the collector would write to each page that is shared
    pid = os.fork()
    if pid == 0:
        _serve(arguments[-1], descriptors)
    gc.unfreeze()
    return pid


def _serve(command: str, descriptors: Sequence[int]) -> NoReturn:
    tracker: Any = resource_tracker
    kept = {0, 1, 2, *descriptors, tracker._resource_tracker._fd}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 1024)):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
    try:
        exec(command, {})
    finally:
        os._exit(0)
