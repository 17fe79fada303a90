"""What of torch observes a thread, and what is private of it: dispatch modes and profilers."""

from __future__ import annotations

import _thread
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch._C._distributed_c10d as c10d
import torch.autograd.profiler
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.compat.torch_private import replaced

_private = cast(Any, torch)
_modes: Callable[[], int] = _private._C._len_torch_dispatch_stack
is_profiled: Callable[[], bool] = _private.autograd._profiler_enabled
"""Whether a profiler sees this thread. Tried: 2.13.0."""


class Unnoticed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode of the harness, at the bottom of those of a program; by itself it observes nobody."""


class _Here(threading.local):
    hidden = False


_here = _Here()


def is_observed() -> bool:
    """Whether a dispatch mode or a profiler of a program sees what this thread computes. Tried: 2.13.0."""
    if _here.hidden:
        return False
    modes = _modes()
    if modes == 1 and isinstance(_private._C._get_dispatch_stack_at(0), Unnoticed):
        modes = 0
    return modes > 0 or is_profiled()


@contextmanager
def unobserved() -> Iterator[None]:
    """While open, none of them sees what this thread computes. Tried: 2.13.0."""
    hidden, _here.hidden = _here.hidden, True
    _private.autograd._enable_record_function(False)
    try:
        with _private._C._DisableTorchDispatch():
            yield
    finally:
        _private.autograd._enable_record_function(not hidden)
        _here.hidden = hidden


@contextmanager
def computed_by_modes() -> Iterator[None]:
    """While open, dispatch modes of this thread are what computes, and nothing is kept from them."""
    hidden, _here.hidden = _here.hidden, True
    try:
        yield
    finally:
        _here.hidden = hidden


_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def mode_flags() -> tuple[bool, ...]:
    """What torch knows, in the whole process, of whether a dispatch mode is entered. Tried: 2.13.0."""
    names = vars(_python_dispatch)
    return names[_FLAGS[0]], names[_FLAGS[1]], names[_FLAGS[2]]


def set_mode_flags(flags: tuple[bool, ...]) -> None:
    """Put back what ``mode_flags`` has given. Tried: 2.13.0."""
    module: Any = _python_dispatch
    vars(module).update(zip(_FLAGS, flags, strict=True))
    module.set_is_in_mode_without_ignore_compile_internals(flags[-1])


class Bottom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode beneath all others that ends what comes as far of operators of c10d: they return what they would.

    ``reached``: whether one has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reached = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Tried: 2.13.0."""
        modes = _taken()
        _put([*modes, self])
        try:
            yield
        finally:
            _taken()
            _put(modes)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        self.reached = True
        return _returned(func._schema, args)


def _returned(schema: Any, args: tuple[Any, ...]) -> Any:
    """What an operator of c10d returns: of its arguments those that it writes, the first of that type; and a work."""
    types = [str(argument.type) for argument in schema.arguments]
    wanted = [str(value.type) for value in schema.returns]
    values = [c10d.FakeWork().boxed() if "Work" in kind else args[types.index(kind)] for kind in wanted]
    return tuple(values) if len(values) > 1 else (values or [None])[0]


def _taken() -> list[Any]:
    """The dispatch modes of this thread, the uppermost first; there are none any more."""
    return [_private._C._pop_torch_dispatch_stack(None) for _ in range(_modes())]


def _put(modes: Sequence[Any]) -> None:
    for mode in reversed(modes):
        _private._C._push_on_torch_dispatch_stack(mode)


class Event:
    """An event of the profiler of this thread, from now to ``end``: one that is over on another thread.

    It has the shapes of ``tensors``. Events of real backends end on their threads, so they are shown as asynchronous.
    Tried: 2.13.0.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        handle = _private.autograd._record_function_with_args_enter(name, *tensors)
        self._over: torch.futures.Future[None] = torch.futures.Future()
        ends: Any = torch.ops.profiler._call_end_callbacks_on_jit_fut
        ends._RecordFunction(handle, self._over)

    def end(self) -> None:
        ended = threading.Lock()
        ended.acquire()

        def over() -> None:
            self._over.set_result(None)
            ended.release()

        _thread.start_new_thread(over, ())
        ended.acquire()


@contextmanager
def profilers_of_ranks(preparing: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While open, each rank may profile, whatever the others do; ``preparing()`` is open where a thread may begin.

    What a profiler sees is kept by thread. But a process has one session of Kineto, which makes traces of it: to
    prepare a second one cancels the first, and to stop one that is gone crashes. So a rank that begins while another
    rank's session lasts has a part in it, and one whose session is gone when it stops is given another.
    Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """
    module: Any = torch.autograd.profiler
    prepare, disable = module._prepare_profiler, module._disable_profiler
    lasts = False

    def prepare_ours(*args: Any, **options: Any) -> None:
        nonlocal lasts
        if not lasts:
            with preparing():
                prepare(*args, **options)
        lasts = True

    def disable_ours() -> Any:
        nonlocal lasts
        if lasts:
            lasts = False
            return disable()
        with _another_session(module, prepare, disable):
            return disable()

    with replaced(module, _prepare_profiler=prepare_ours, _disable_profiler=disable_ours):
        yield


@contextmanager
def _another_session(module: Any, prepare: Callable[..., None], disable: Callable[[], Any]) -> Iterator[None]:
    """While open, there is a session of Kineto, of a thread that begins and ends meanwhile."""
    begun, used, over = threading.Lock(), threading.Lock(), threading.Lock()
    for lock in (begun, used, over):
        lock.acquire()

    def hold() -> None:
        idle = module.profile()
        begin = functools.partial(prepare, idle.config(create_trace_id=True), idle.kineto_activities)
        begin()
        module._enable_profiler(idle.config(), idle.kineto_activities)
        begun.release()
        used.acquire()
        begin()
        disable()
        over.release()

    _thread.start_new_thread(hold, ())  # a thread of ``threading`` would be the rank that starts it
    begun.acquire()
    try:
        yield
    finally:
        used.release()
        over.acquire()
