"""GPUs played on the CPU in real processes, as on simulated ranks, so that what they compute can be compared.

``begin`` is called as a process starts (benchmarks/scripts.py), in those that a script spawns too. Generators that
nobody has seeded begin with the numbers that simulated ranks begin with.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch.distributed as dist

DEVICES: Final = "FSDPCHECK_PLAYED_DEVICES"
"""Variable of the environment: GPUs of a node; 0 for none, in which case only generators are set."""
LOGS: Final = "FSDPCHECK_PLAYED_LOGS"
"""Variable of the environment: the folder where each process prints to a file of its own; torchrun has them itself."""


def begin() -> None:
    """In this process from here on."""
    rank = _ranks[0] = int(os.environ.get("RANK", "0"))
    if folder := os.environ.get(LOGS):
        _print_apart(folder)
        os.register_at_fork(after_in_child=functools.partial(_print_apart, folder))
    _begin_generators(rank)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # whole lines, of all processes
    spawning: Any = importlib.import_module("torch.multiprocessing.spawn")
    real = spawning._wrap

    @functools.wraps(real)
    def wrap(function: Any, index: int, *rest: Any) -> Any:
        _ranks[0] = index
        _begin_generators(index)
        return real(function, index, *rest)

    spawning._wrap = wrap
    if devices := int(os.environ[DEVICES]):
        from fsdpcheck.compat.torch_private import replaced
        from fsdpcheck.simulation.programs.cuda import CudaAsCpu

        played, stack = CudaAsCpu(lambda: _ranks[0], devices, "gloo"), ExitStack()
        stack.enter_context(played.in_place())
        stack.enter_context(played.on_thread())
        for name in ("init_process_group", "new_group"):
            stack.enter_context(replaced(dist, **{name: _kept_for_ever(getattr(dist, name))}))
        _kept.append(stack)


_kept: list[Any] = []
_ranks = [0]
"""The rank that this process is, as far as that is known before its program tells."""


def _kept_for_ever(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, whose process groups are never destroyed.

    Gloo's destructor waits, with the interpreter's lock, for a thread that wants the lock to let go of a function mode.
    """

    def ours(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        for group in (made, dist.group.WORLD):
            if group is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return made

    return ours


def _print_apart(folder: str) -> None:
    log = os.open(os.path.join(folder, f"std-{os.getpid()}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _begin_generators(rank: int) -> None:
    import numpy as np
    import torch

    from fsdpcheck.simulation.globals import UNSEEDED

    torch.default_generator.manual_seed(UNSEEDED + rank)
    random.seed(UNSEEDED + rank)
    np.random.set_state(np.random.RandomState(np.random.MT19937(UNSEEDED + rank)).get_state())
