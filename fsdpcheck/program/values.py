"""Which numbers pass through the functions of an implementation, and where: what its variables hold, line by line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdpcheck.compat import frames_private, layouts_private, torch_private
from fsdpcheck.execution import RankResult
from fsdpcheck.execution.values import OUTSIDE, Raised, Value

NUMBERS: Final = 256
"""Most numbers of a tensor that is looked at."""
VALUES: Final = 30_000
"""Most values that are noted in all."""
_MEMBERS: Final = 16
"""Most members of a container, or attributes of an object, that are looked at."""
_RETURNED: Final = 3
"""Newest functions that are known of what a function has called."""
_FRAMES: Final = 3
"""Most functions that are noted of what is raised."""
_INNER: Final = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")
TAKE: Final = ("_take", "_computed")
"""Names of the harness's functions that have a step taken, or a kernel compute."""


class Values:
    """While entered on a thread, notes into ``result`` each new Value there of functions of an implementation.

    Tensors of floating types and numbers are looked at: variables, what functions return, members of lists, tuples and
    dicts, gradients, and attributes of ``self`` that is no module. Nothing that is looked at changes, nor is it kept.
    Of what is raised the newest is noted. What had been set to trace the thread is back afterwards.
    """

    def __init__(self, result: RankResult) -> None:
        self._result, self._before = result, None
        self._own: dict[CodeType, bool] = {}
        self._frames: dict[FrameType, _Frame] = {}
        self._raised: BaseException | None = None
        self._large: set[tuple[CodeType, str]] = set()

    def __enter__(self) -> None:
        self._before = sys.gettrace()  # type: ignore[assignment]
        sys.settrace(self._called)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(self._before)
        self._frames.clear()
        self._raised = None

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._is_own(frame.f_code):
            return None
        caller = self._caller(frame)
        self._frames[frame] = _Frame(frame, _takes_a_step(frame) if caller is None else caller.in_step)
        return self._traced

    def _caller(self, frame: FrameType) -> _Frame | None:
        """What is known of the innermost caller in an implementation."""
        at = frame.f_back
        while at is not None and at not in self._frames:
            at = at.f_back
        return None if at is None else self._frames[at]

    def _is_own(self, code: CodeType) -> bool:
        own = self._own.get(code)
        if own is None:
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # and no module or class body, of an import
            own = self._own[code] = is_function and not frames_private.is_plumbing(code.co_filename)
        return own

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        held = self._frames.get(frame)
        if held is None:
            return None
        if event == "exception":
            self._note_raised(frame, argument[1])
        elif event in ("line", "return"):
            self._look(frame, held, [("", argument)] if event == "return" else [])
            held.line = frame.f_lineno
        if event == "return":
            del self._frames[frame]
            self._returned(frame)
        return self._traced

    def _look(self, frame: FrameType, held: _Frame, returned: list[tuple[str, object]]) -> None:
        """Note what is new behind the line that has run."""
        if held.line < 0:
            return
        if len(self._result.values) >= VALUES:
            self._result.unread.cut = self._result.unread.cut or _at(frame, held)
            return
        seen = [each for name, value in [*frame.f_locals.items(), *returned] for each in _within(name, value)]
        if seen:
            with layouts_private.aside():
                self._note(frame, held, seen)

    def _note(self, frame: FrameType, held: _Frame, seen: list[tuple[str, Tensor | float]]) -> None:
        """All are read again: kernels write past the counter of a tensor's versions, and so do writes to ``data``."""
        for path, one in seen:
            numbers = _numbers(one)
            if numbers is None or held.numbers.get(path) == numbers:
                continue
            held.numbers[path] = numbers
            code = frame.f_code
            if not numbers:
                self._leave_out(code, path, _at(frame, held))
                continue
            place, step = f"{code.co_filename}:{held.line}", len(self._result.steps) if held.in_step else OUTSIDE
            whole = isinstance(one, Tensor)
            self._result.values.append(
                Value(step, place, code.co_qualname, held.caller, path, numbers, held.returned, whole)
            )

    def _leave_out(self, code: CodeType, path: str, at: str) -> None:
        """A variable whose numbers are too many is counted once."""
        unread = self._result.unread
        if (code, path) not in self._large:
            self._large.add((code, path))
            unread.large += 1
            unread.first = unread.first or at

    def _returned(self, frame: FrameType) -> None:
        caller, code = self._caller(frame), frame.f_code
        if caller is not None and not code.co_qualname.endswith(_INNER):
            told = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"
            caller.returned = (*(one for one in caller.returned if one != told), told)[-_RETURNED:]

    def _note_raised(self, frame: FrameType, error: object) -> None:
        if error is self._raised or isinstance(error, StopIteration):
            return
        self._raised = error if isinstance(error, BaseException) else None
        frames: list[str] = []
        returned: list[tuple[str, ...]] = []
        at: FrameType | None = frame
        while at is not None and len(frames) < _FRAMES:
            held = self._frames.get(at)
            if held is not None:
                frames.append(f"{at.f_code.co_filename}:{at.f_lineno} {at.f_code.co_qualname}")
                returned.append(held.returned)
            at = at.f_back
        self._result.raised = Raised(type(error).__name__, tuple(frames), tuple(returned))


class _Frame:
    """What is known of a call that runs: ``line``, the newest that has run, -1 for none."""

    def __init__(self, frame: FrameType, in_step: bool) -> None:
        self.line, self.in_step = -1, in_step
        self.caller = next(iter(frames_private.lines_of(frame.f_back, 1)), "")
        self.numbers: dict[str, tuple[float, ...]] = {}
        self.returned: tuple[str, ...] = ()


def _at(frame: FrameType, held: _Frame) -> str:
    return f"{frame.f_code.co_filename}:{held.line} {frame.f_code.co_qualname}"


def _takes_a_step(frame: FrameType) -> bool:
    """Whether the function was called where the harness has something computed, and not where something is shown."""
    at = frame.f_back
    while at is not None and not frames_private.is_harness(at.f_code.co_filename):
        at = at.f_back
    return at is not None and at.f_code.co_name in TAKE


def _within(name: str, value: object) -> Iterator[tuple[str, Tensor | float]]:
    """(path, value) of what is looked at in a variable, or in what was returned (``name`` "")."""
    if isinstance(value, Tensor):
        yield name, value
        if value.is_leaf and isinstance(value.grad, Tensor):
            yield f"{name}.grad", value.grad
    elif isinstance(value, float):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value[:_MEMBERS]):
            if isinstance(one, (Tensor, float)):
                yield from _within(f"{name}[{number}]", one)
    elif isinstance(value, dict):
        for key, one in [*value.items()][:_MEMBERS]:
            if isinstance(key, (str, int)) and isinstance(one, (Tensor, float)):
                yield from _within(f"{name}[{key!r}]", one)
    elif name == "self" and not isinstance(value, nn.Module):
        for key, one in [*getattr(value, "__dict__", {}).items()][:_MEMBERS]:
            if isinstance(one, (Tensor, float, list, tuple, dict)):
                yield from _within(f"{name}.{key}", one)


def _bytes(value: Tensor) -> int:
    """Of the storage; 0 where there is none."""
    try:
        return value.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return 0


def _numbers(value: Tensor | float) -> tuple[float, ...] | None:
    """None for what is not looked at, () for what has too many."""
    if isinstance(value, float):
        return (float(value),)  # which numpy.float64 is too
    own = layouts_private.untransformed(torch_private.own_part(value))
    if type(own) not in (Tensor, nn.Parameter) or own.layout is not torch.strided or own.is_meta:
        return None
    if not own.is_floating_point() or not own.numel():
        return None
    last = own.storage_offset() + sum((n - 1) * stride for n, stride in zip(own.shape, own.stride(), strict=True))
    if (last + 1) * own.element_size() > _bytes(own):
        return None  # it is freed
    if own.numel() > NUMBERS:
        return ()
    return tuple(own.detach().to("cpu", torch.float64).flatten().tolist())
