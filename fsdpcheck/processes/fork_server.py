"""The server that worker processes are forked from: it has imported what all of them need, and runs nothing itself."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fsdpcheck.compat import multiprocessing_private
from fsdpcheck.processes import leftovers

_PRELOADED: Final = (
    "fsdpcheck.engines._real.follower",
    "fsdpcheck.engines._simulated.service",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "torch.onnx",
)


def fork() -> None:
    """Make the server a fork of this process, which has no other thread yet, with all that is preloaded imported.

    Where that fails, for a module that cannot be imported say, it is started when it is first needed.
    """
    with suppress(Exception):
        preload()
        with multiprocessing_private.server_by_fork():
            context()


def preload() -> None:
    """Import what all workers need. Raises what the imports raise."""
    for name in _PRELOADED:
        importlib.import_module(name)


def context(modules: Sequence[str] = ()) -> Any:
    """The multiprocessing context that forks from the server, which is started if it does not run yet.

    ``modules``: what it imports besides; who comes first decides.
    """
    found: Any = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*_PRELOADED, *modules])
    with _our_path_and_mark(), without_main():
        multiprocessing_private.keep_its_files_in(leftovers.folder_prefix())
        forkserver.ensure_running()
    return found


@contextmanager
def without_main() -> Iterator[None]:
    """A process that is started within it does not import the program of this one, which may begin all over there."""
    kept = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = kept


def follow_parent_into_death(folder: Path) -> None:
    """Have this process, which leads its group, end with the one that started it, whatever it is in; and its folder."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


@cache
def _mark() -> str:
    """What all that this process starts is known by; where no session has given it one, it ends them at its own end."""
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    atexit.register(leftovers.end_marked, mark)
    return mark


@contextmanager
def _our_path_and_mark() -> Iterator[None]:
    """Let the fork server preload from where this process imports (CPython drops the path it is given, gh-126631).

    It would look in the working folder first, and in a checkout find another copy of what is installed. And mark it.
    """
    names = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path), "PYTHONSAFEPATH": "1"}
    if leftovers.MARK not in os.environ:
        names[leftovers.MARK] = _mark()
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
