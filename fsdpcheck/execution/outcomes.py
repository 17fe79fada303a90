"""How a rank's program ended, as data: what it raised, and whether that is the adapter's fault or a finding."""

from __future__ import annotations

import traceback
from types import TracebackType

from fsdpcheck.compat import frames_private
from fsdpcheck.errors import AdapterError, NotSupported, excerpt, qualified
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.deadlock import Exited, Raised


def ending(rank: int, error: BaseException) -> Raised | Exited:
    """The state of a rank whose program ended by ``error``; sys.exit is leaving, everything else raising."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Exited(rank, code, _where(error.__traceback__))
    message = excerpt.told(error).strip().splitlines()[0]
    return Raised(rank, _text(error), excerpt.kind(error), _where(error.__traceback__), message)


def adapter_failure(rank: int, error: BaseException) -> Failure | None:
    """The failure of kind "adapter" that ``error`` is, or None when it is a finding: by class, never by its name."""
    if not isinstance(error, AdapterError | NotSupported):
        return None
    kind = NotSupported if isinstance(error, NotSupported) else AdapterError
    return Failure("adapter", excerpt.said(error), (RankState(rank, "raised"),), qualified(kind))


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


def _where(trace: TracebackType | None) -> str:
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not frames_private.is_plumbing(code.co_filename):
            where = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return excerpt.excerpt(where)
