"""Forked children of ranks: processes of their own, which no rank can meet."""

from __future__ import annotations

import mmap
import os
from typing import Final

from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.execution import Failure
from fsdpcheck.execution.outcomes import adapter_failure

_SHARED: Final = 1


class Children:
    """Those of one run. The page is shared with them, for nobody need look at what a child raises."""

    def __init__(self) -> None:
        self._process, self._page = os.getpid(), mmap.mmap(-1, _SHARED)

    def require_none(self) -> None:
        """Before anything is communicated: raises NotSupported in a child, and lets the run know of it."""
        if os.getpid() != self._process:
            self._page[0] = 1
            raise _refused()

    @property
    def failure(self) -> Failure | None:
        """What is said of a run in which a child wanted to communicate."""
        return adapter_failure(0, _refused()) if self._page[0] else None


def _refused() -> NotSupported:
    return NotSupported(
        explain(
            "a process that a rank has forked uses torch.distributed, and simulated ranks are threads of one process",
            got="torch.distributed in a child of a rank",
            wanted="ranks that communicate themselves, or torch.multiprocessing.spawn(..., nprocs=W)",
            then="simulate the function that the child runs, on as many ranks, or run on real ranks",
        )
    )
