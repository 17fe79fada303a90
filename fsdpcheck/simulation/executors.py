"""Executors that a rank's program made, used, and never shut down: their threads wait for more until Python ends them.

Python ends the threads of one that nobody holds any more, and of all others at its exit. Neither is asked for by the
program, and neither says when. Those that libraries make are theirs to end, and are not looked at.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from fsdpcheck.compat import frames_private
from fsdpcheck.compat.torch_private import replaced

_INSTALLED = "-packages"


class Executors:
    """Those of one rank that were given tasks, and how many of them were not shut down, by the line that made them."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self.side_by_side = False
        """Whether one with several threads was given several tasks."""

    @property
    def left(self) -> list[str]:
        """In words, those that were not."""
        return [f"the executor of threads made at {where}" for where in +self._used]


@contextmanager
def executors_of_ranks(of_this_rank: Callable[[], Executors | None], give: Callable[..., Any]) -> Iterator[None]:
    """While open, executors that programs of ranks make are written down, and tasks are submitted by ``give``.

    It is called with what submits to the executor, the task, and the task's arguments."""
    made: WeakKeyDictionary[ThreadPoolExecutor, tuple[Executors, str]] = WeakKeyDictionary()
    used: WeakKeyDictionary[ThreadPoolExecutor, tuple[Executors, str]] = WeakKeyDictionary()
    make, submit, shutdown = ThreadPoolExecutor.__init__, ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown

    def make_ours(executor: ThreadPoolExecutor, *args: Any, **options: Any) -> None:
        make(executor, *args, **options)
        mine, where = of_this_rank(), _asked_at()
        if mine is not None and where:
            made[executor] = mine, where

    def submit_ours(executor: Any, task: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        if (found := made.pop(executor, None)) is not None:
            used[executor] = found
            found[0]._used[found[1]] += 1
        elif (found := used.get(executor)) is not None and executor._max_workers > 1:
            found[0].side_by_side = True
        return give(partial(submit, executor), task, *args, **options)

    def shutdown_ours(executor: ThreadPoolExecutor, *args: Any, **options: Any) -> None:
        if (found := used.pop(executor, None)) is not None:
            found[0]._used[found[1]] -= 1
        shutdown(executor, *args, **options)

    with replaced(ThreadPoolExecutor, __init__=make_ours, submit=submit_ours, shutdown=shutdown_ours):
        yield


def _asked_at() -> str:
    """file:line of the caller, if that is a program of the user's, and neither installed nor Python's own."""
    frame = sys._getframe(1)
    while frames_private.is_harness(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}" if frames_private.is_a_program(file) and _INSTALLED not in file else ""
