"""The process in which kernel cases run: Triton is interpreted there, and only there.

Whether Triton is interpreted is decided when it is imported, so a process in which ranks train cannot do both, nor can
one be forked from it.
"""

from __future__ import annotations

import os
from functools import cache

from fsdpcheck.compat import triton_private
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.execution import Execution, RunRequest


class Interpreter:
    """Runs kernel cases in one process, which starts at the first of them and ends with this one."""

    name = "interpreter"

    def __init__(self) -> None:
        self._engine = ProcessesEngine(start_method="spawn")

    def run(self, request: RunRequest) -> Execution:
        """See engines/base.py; a kernel that kills its process is the failure "lost"."""
        kept = os.environ.get(triton_private.SWITCH)
        os.environ[triton_private.SWITCH] = "1"  # what a process is started with, it has
        try:
            return self._engine.run(request)
        finally:
            if kept is None:
                del os.environ[triton_private.SWITCH]
            else:
                os.environ[triton_private.SWITCH] = kept


@cache
def interpreter() -> Interpreter:
    """The one of this process."""
    return Interpreter()
