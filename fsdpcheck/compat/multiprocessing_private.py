"""What multiprocessing keeps private: its fork server as a fork of this process, and what a fork inherits of it.

Tried on Python 3.11; 3.12 was read. multiprocessing starts the server as a new program, which imports everything once
more.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import process, resource_tracker, util
from typing import Any, Final, NoReturn, cast

_LONGEST: Final = 80
"""Characters of a folder's name: macOS takes 103 of a socket, whose own name has up to 20 of them."""


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


def keep_its_files_in(prefix: str) -> None:
    """Have the files of this process, as its server's socket, lie in a folder whose name begins so.

    It is removed at the end of the process; of one that is killed others may know it by its name. Nothing is done where
    there is such a folder already, or where the name of a socket in it would be too long for the system.
    """
    private, config = cast(Any, util), cast(Any, process.current_process())._config
    if config.get("tempdir") is not None:
        return
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) > _LONGEST:
        os.rmdir(folder)
        return
    others_may_have_removed_it = True
    private.Finalize(None, shutil.rmtree, args=(folder, others_may_have_removed_it), exitpriority=-100)
    config["tempdir"] = folder


def forget_what_the_parent_has() -> None:
    """In a child by ``os.fork``: its parent's processes are none of its own, nor is what these do at their end."""
    of_processes: Any = process
    of_processes._children = set()
    private: Any = util
    private._finalizer_registry.clear()


def end_servers() -> None:
    """Of what Python does at its end and ``os._exit`` does not: servers of managers and daemons are ended."""
    private: Any = util
    private._run_finalizers(0)
    for child in process.active_children():
        if child.daemon:
            child.kill()
            child.join()


def keep_to_the_end() -> None:
    """What was imported is not taken apart where a process ends that was forked: custom operators of torch, say."""
    registry: Any = weakref.finalize
    for found in list(registry._registry):
        found.atexit = False


def _fork(program: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """As util.spawnv_passfds, for ``python -c COMMAND``: the number of a process that runs the command."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # the collector would write to each page that is shared
    pid = os.fork()
    if pid == 0:
        _serve(arguments[-1], descriptors)
    if not was_frozen:  # otherwise all would be looked through once more that this process was forked with
        gc.unfreeze()
    return pid


def _serve(command: str, descriptors: Sequence[int]) -> NoReturn:
    tracker: Any = resource_tracker
    close_files_but({0, 1, 2, *descriptors, tracker._resource_tracker._fd})
    try:
        exec(command, {})
    finally:
        os._exit(0)


def close_files_but(kept: Collection[int | None]) -> None:
    """In a child by ``os.fork``: what its parent has open and it does not need; an end of a pipe would stay open."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 1024)):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
