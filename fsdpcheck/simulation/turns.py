"""Threads that a rank starts are that rank: they know its groups, and call collectives while its own thread waits.

A rank's own thread has the rank's turn while it runs, and gives it up where it waits for other threads: in Thread.join
and in Condition.wait, with them Event.wait, queue.Queue and the results of futures; at a lock that its program made;
and in time.sleep, by which other ranks go on too. A thread it started, or a task it gave to a ThreadPoolExecutor, takes
the turn for each call of a collective. A thread that is blocked in its call lets the others have the turn; when none of
them can do anything, the rank is blocked and the other ranks go on. A rank has ended when what it started has, daemons
aside. A call that comes while the rank's own thread is busy waits until that waits; if it never does, the run stands
still and says so. What never ends is left alone (simulation/stragglers.py).

What a thread computes between its calls is not put off, so while its rank is blocked in a collective of its own, it
sees the random generators and settings of whichever rank runs. That is noted in the run's voids.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import thread as executors
from contextlib import contextmanager
from typing import Any

from fsdpcheck.compat import torch_private
from fsdpcheck.compat.observers_private import is_observed, unobserved
from fsdpcheck.simulation.current_rank import here
from fsdpcheck.simulation.executors import Executors, executors_of_ranks
from fsdpcheck.simulation.program_locks import locks_of_programs
from fsdpcheck.simulation.turn import turn_kept, waiting


def in_turn(
    method: Callable[..., Any], shared: Callable[..., tuple[Hashable, ...]] | None = None
) -> Callable[..., Any]:
    """A method that a rank calls in its turn; another thread of the rank takes the turn for it.

    ``shared``, called as the method is: by which its calls are in order among the threads of a rank; None for none.
    What watches the thread, a profiler say, sees nothing of it.
    """

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if is_observed():
            with unobserved():
                return call(*args, **options)
        turn, own = here.borrowed, here.turn
        if turn is None:
            if shared is not None and own is not None and own.has_others:
                own.call(shared(*args, **options))
            return method(*args, **options)
        with turn.taken(None if shared is None else shared(*args, **options)):
            here.borrowed, here.lent = None, turn
            try:
                return method(*args, **options)
            finally:
                here.borrowed, here.lent = turn, None

    return call


@contextmanager
def threads_of_ranks() -> Iterator[None]:
    """While open, threads and tasks that ranks start are those ranks, and a rank that waits gives up its turn."""
    make, start, join = threading.Thread.__init__, threading.Thread.start, threading.Thread.join
    wait, sleep = threading.Condition.wait, time.sleep

    def make_ours(thread: threading.Thread, *args: Any, **options: Any) -> None:
        make(thread, *args, **options)
        if here.number is not None and options.get("daemon") is None:
            thread.daemon = False  # as if the rank's own thread, from which it has this, were none

    def start_ours(thread: threading.Thread) -> None:
        turn = here.turn or here.borrowed
        with turn_kept():
            if turn is None:
                start(thread)
            elif getattr(thread, "_target", None) is executors._worker:  # its tasks are ranks, not itself
                thread.daemon = True
                start(thread)
            else:
                turn.start(thread, start)

    def join_ours(thread: threading.Thread, timeout: float | None = None) -> None:
        waiting(join, thread, timeout)
        turn = here.turn or here.borrowed
        if turn is not None and not thread.is_alive():
            turn.joined(thread)

    def wait_ours(condition: threading.Condition, timeout: float | None = None) -> bool:
        return bool(waiting(wait, condition, timeout))

    def sleep_ours(seconds: float) -> None:
        if here.turn is not None:
            here.turn.let_others_go_on()
        waiting(sleep, seconds)

    with (
        executors_of_ranks(_executors, _submit),
        locks_of_programs(),
        torch_private.replaced(threading.Thread, __init__=make_ours, start=start_ours, join=join_ours),
        torch_private.replaced(threading.Condition, wait=wait_ours),
        torch_private.replaced(time, sleep=sleep_ours),
    ):
        yield


def _executors() -> Executors | None:
    turn = here.turn or here.borrowed
    return None if turn is None else turn.executors


def _submit(submit: Callable[..., Any], task: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Give a task to an executor, to be run as this rank if this is one."""
    turn = here.turn or here.borrowed
    return submit(task, *args, **options) if turn is None else turn.submit(submit, task, *args, **options)
