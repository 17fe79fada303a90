"""Private names of torch's dispatcher and its modes, with the releases each was tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.compat.torch_private import replaced

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Operations that wait for a call, or hand its tensors on."""


def keep_under_all_modes(mode: Any, wanted: bool) -> None:
    """Have a dispatch mode of this thread at the bottom of the modes that a program has entered, or not at all.

    At the bottom, leaving a mode of the program takes away that mode and not ours. Tried: 2.13.0.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    stack = [one for one in _get_current_dispatch_mode_stack() if getattr(one, "_mode_key", None) is None]
    if sum(one is mode for one in stack) == int(wanted):
        return
    for _ in stack:
        _pop_mode()
    others = [one for one in stack if one is not mode]
    for one in [mode, *others] if wanted else others:
        _push_mode(one)


def accesses(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors whose values an operation reads or writes, and whether it writes; a view reads none.

    Tried: 2.13.0.
    """
    if func.namespace in _COMMUNICATION:
        return
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            value = args[number]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor, alias is not None


@contextmanager
def after_each_backward(done: Callable[[], object]) -> Iterator[None]:
    """While open, ``done`` is called on the thread of each backward that has ended. Tried: 2.13.0."""
    run = torch.autograd.graph._engine_run_backward

    def run_and_tell(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        finally:
            done()

    with replaced(torch.autograd, _engine_run_backward=run_and_tell):
        yield
