"""Whose data a collective moves, read off the call stack."""

from __future__ import annotations

from types import CodeType, FrameType

from fsdpcheck.compat import torch_private

_TELLS: dict[int, tuple[str, CodeType]] = {}
"""By identity of the code, which is kept alive for it: to hash code is to hash all that is in it."""


def subject(frame: FrameType | None) -> str:
    """The unit whose data travels: the nearest frame whose ``self`` says so (torch_private.subject_of), else ""."""
    while frame is not None:
        code = frame.f_code
        known = _TELLS.get(id(code))
        local = known[0] if known is not None else _tells(code)
        if local:
            name = torch_private.subject_of(frame.f_locals.get(local))
            if name is not None:
                return name
        frame = frame.f_back
    return ""


def _tells(code: CodeType) -> str:
    """The local variable of this code that can be a sharding unit, or ""; decided by its source, never by who ran."""
    local = ""
    if not torch_private.is_plumbing(code.co_filename):
        arguments = code.co_varnames[: code.co_argcount]
        local = next((name for name in torch_private.SUBJECT_LOCALS if name in arguments), "")
    _TELLS[id(code)] = local, code
    return local
