"""Which lines of an implementation a rank's program runs."""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any

from fsdpcheck.compat import frames_private
from fsdpcheck.execution import Line


class Lines:
    """While entered on a thread, ``found`` gets each line that runs there of functions of an implementation.

    Of calls that began before nothing is seen. What a debugger or a measure of coverage had set to trace the thread is
    back afterwards.
    """

    def __init__(self, found: set[Line]) -> None:
        self._found = found
        self._before: Any = None
        self._own: dict[CodeType, bool] = {}

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        own = self._own.get(code)
        if own is None:
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # and no module or class body, of an import
            own = self._own[code] = is_function and not frames_private.is_plumbing(code.co_filename)
        return self._line if own else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._found.add((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        return self._line
