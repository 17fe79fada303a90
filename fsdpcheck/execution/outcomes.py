"""How a rank's program ended, as data: what it raised, and whether that is the adapter's fault or a finding."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Final

import torch

from fsdpcheck.compat import frames_private
from fsdpcheck.errors import AdapterError, NotSupported, excerpt, explain, qualified
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.deadlock import Exited, Raised

_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
"""What torch says of the CPU's memory, in a RuntimeError like any other (c10's alloc_cpu.cpp). Tried: 2.13.0."""


def ending(rank: int, error: BaseException) -> Raised | Exited:
    """The state of a rank whose program ended by ``error``; sys.exit is leaving, everything else raising."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Exited(rank, code, where(error.__traceback__))
    message = excerpt.told(error).strip().splitlines()[0]
    return Raised(rank, _text(error), excerpt.kind(error), where(error.__traceback__), message)


def adapter_failure(rank: int, error: BaseException) -> Failure | None:
    """The failure of kind "adapter" that ``error`` is, or None when it is a finding: by class, never by its name.

    Memory that ran out is one too, for how much there is says nothing of an implementation; torch tells it in words.
    """
    if isinstance(error, AdapterError | NotSupported):
        kind = NotSupported if isinstance(error, NotSupported) else AdapterError
        text = excerpt.said(error)
    elif _of_memory(error):
        kind, text = AdapterError, _no_memory(rank, error)
    else:
        return None
    return Failure("adapter", text, (RankState(rank, "raised"),), qualified(kind))


def _of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: Python's, torch's of a device, or torch's of the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and _ALLOCATOR in excerpt.told(error)


def _no_memory(rank: int, error: BaseException) -> str:
    return explain(
        f"rank {rank} ran out of memory",
        got=excerpt.told(error).strip().splitlines()[0],
        wanted="memory for all ranks at once, for they share this machine",
        where=where(error.__traceback__),
        then="fewer ranks, fewer processes at once (of a check: --jobs 1), a smaller model, or a larger machine",
    )


def _text(error: BaseException) -> str:
    """The traceback of the implementation and the innermost frame; of torch and the harness around it nothing else."""
    *outer, innermost = traceback.extract_tb(error.__traceback__) or [None]
    frames = [frame for frame in outer if frame is not None and not frames_private.is_plumbing(frame.filename)]
    shown = [
        f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}\n" for frame in (*frames, innermost) if frame
    ]
    lines = [excerpt.excerpt("".join(shown)), excerpt.told(error)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines += ["caused by ", excerpt.told(cause)]
    return "".join(lines)


def where(trace: TracebackType | None) -> str:
    """file:line of the innermost frame of an implementation; "" if there is none."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not frames_private.is_plumbing(code.co_filename):
            place = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return excerpt.excerpt(place)
