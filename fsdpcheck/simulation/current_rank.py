"""Who a thread is, of those that are ranks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from fsdpcheck.errors import NotSupported

if TYPE_CHECKING:
    from fsdpcheck.simulation.turn import Turn


class _Here(threading.local):
    """Who a thread is. ``number``: the rank; None: no rank. ``home``: what its groups are made for.

    ``turn``: that of the rank whose own thread this is. ``borrowed``: that of the rank which started this thread.
    ``lent``: the same, while this thread has the turn. ``thread``: which of the rank's threads it is, in every run.
    """

    number: int | None = None
    home: Any = None
    turn: Turn | None = None
    borrowed: Turn | None = None
    lent: Turn | None = None
    thread: str = "its own thread"


here = _Here()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: here.__dict__.clear())  # a forked child of a rank is no rank


def current_rank() -> int | None:
    """The global rank this thread is, or None outside rank threads and those that they start."""
    return here.number


def set_current_rank(rank: int) -> None:
    here.number = rank


def require_rank() -> int:
    """The global rank this thread is. Raises NotSupported outside."""
    if here.number is None:
        raise NotSupported(
            f"torch.distributed was used in a thread that is no rank\n"
            f"  got     thread {threading.current_thread().name!r} of process {os.getpid()}\n"
            f"  wanted  the rank's own thread, or one that it started by threading or a ThreadPoolExecutor\n"
            f"  next    start the thread where the rank's program runs, or run on real ranks"
        )
    return here.number
