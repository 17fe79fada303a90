"""Whose data a collective moves and which line asked for it, read off the call stack."""

from __future__ import annotations

from types import CodeType, FrameType

from fsdpcheck.compat import frames_private

_TELLS: dict[int, tuple[str, bool, CodeType]] = {}
"""By identity of the code, which is kept alive for it: to hash code is to hash all that is in it."""
_LINES: dict[tuple[int, int], str] = {}
"""By identity of the code in ``_TELLS`` and line: the line as text, one object however often it calls."""


def subject_and_line(frame: FrameType | None) -> tuple[str, str]:
    """The unit whose data travels and the line that asked for it, each "" where the stack does not tell.

    The unit: the nearest frame whose ``self`` says so (frames_private.subject_of). The line: file:line of the nearest
    frame that is neither torch's nor the harness's.
    """
    subject = line = ""
    while frame is not None and not (subject and line):
        code = frame.f_code
        local, is_callers, _ = _TELLS.get(id(code)) or _tells(code)
        if is_callers and not line:
            line = _line(code, frame.f_lineno)
        if local and not subject:
            subject = frames_private.subject_of(frame.f_locals.get(local)) or ""
        frame = frame.f_back
    return subject, line


def caller_of(frame: FrameType | None) -> str:
    """Where the function was called whose line ``subject_and_line`` gives; "" where only torch or the harness did."""
    return line_text(line_of(frame, 1))


def line_of(frame: FrameType | None, further: int = 0) -> tuple[CodeType, int] | None:
    """Code and number of the line that ``subject_and_line`` would give, without text: for those who rarely show it.

    ``further``: how many such lines further out.
    """
    while frame is not None:
        code = frame.f_code
        if (_TELLS.get(id(code)) or _tells(code))[1]:
            if not further:
                return code, frame.f_lineno
            further -= 1
        frame = frame.f_back
    return None


def line_text(line: tuple[CodeType, int] | None) -> str:
    """file:line, or ""."""
    return _line(*line) if line is not None else ""


def _tells(code: CodeType) -> tuple[str, bool, CodeType]:
    """What its source decides, never who ran it: the local variable of this code that can be a sharding unit, or "",
    and whether its lines are a caller's."""
    local, plumbing = "", frames_private.is_plumbing(code.co_filename)
    if not plumbing:
        arguments = code.co_varnames[: code.co_argcount]
        local = next((name for name in frames_private.SUBJECT_LOCALS if name in arguments), "")
    _TELLS[id(code)] = found = local, not plumbing and not frames_private.is_torch(code.co_filename), code
    return found


def _line(code: CodeType, number: int) -> str:
    return _LINES.get((id(code), number)) or _LINES.setdefault((id(code), number), f"{code.co_filename}:{number}")
