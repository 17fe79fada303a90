"""Private names of torch's dispatcher and its modes, with the releases each was tried on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fsdpcheck.compat.torch_private import replaced

COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operations that wait for a call, or hand its tensors on."""
WITHOUT_VALUES = frozenset(("empty_like", "new_empty", "new_empty_strided", "empty", "empty_strided"))
"""Operations that write nothing to what they make."""
OF_SHAPES = WITHOUT_VALUES | {
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}
"""Operations that look at the shape of a tensor alone."""
_WRITES = {"all_gather_copy_in": ("all_gather_output",)}
"""Arguments that operations write to though their schemas do not say so."""


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


def is_unwrapped(types: Sequence[type]) -> bool:
    """Whether tensors of these types are wrappers that call the operation again, of what they hold. Tried: 2.13.0."""
    return any(issubclass(kind, _wrappers()) for kind in types)


@functools.cache
def _wrappers() -> tuple[type, ...]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


def accesses(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors whose values an operation reads or writes, and whether it writes; a view reads none.

    Tried: 2.13.0.
    """
    for number, name, writes in operation(func).arguments:
        if number < len(args):
            value = args[number]
        elif name in kwargs:
            value = kwargs[name]
        else:
            continue
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor, writes


@dataclass(frozen=True, slots=True)
class Operation:
    """What a schema says. ``name``: without namespace and overload. ``arguments``: of each whose values matter its
    number, its name and whether it is written."""

    func: Any
    name: str
    namespace: str
    text: str
    arguments: tuple[tuple[int, str, bool], ...]


_OPERATIONS: dict[int, Operation] = {}
"""By identity of the operation, which is kept alive for it: its hash is computed in Python."""


def operation(func: Any) -> Operation:
    """Tried: 2.13.0."""
    return _OPERATIONS.get(id(func)) or _OPERATIONS.setdefault(id(func), _read(func))


def _read(func: Any) -> Operation:
    name = str(func._schema.name).rpartition("::")[2]
    found = []
    for number, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if "Tensor" in str(argument.type) and (alias is None or alias.is_write):
            found.append((number, argument.name, alias is not None or argument.name in _WRITES.get(name, ())))
    if func.namespace in COMMUNICATION or name in OF_SHAPES:
        found = []
    return Operation(func, name, func.namespace, str(func), tuple(found))


@contextmanager
def within_each_backward(opened: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While open, ``opened()`` is entered on the thread of each backward, for as long as that runs. Tried: 2.13.0."""
    run = torch.autograd.graph._engine_run_backward

    def run_within(*args: Any, **options: Any) -> Any:
        with opened():
            return run(*args, **options)

    with (
        replaced(torch.autograd, _engine_run_backward=run_within),
        replaced(torch.autograd.graph, _engine_run_backward=run_within),
    ):
        yield


undispatched: Callable[[], AbstractContextManager[object]] = cast(Any, torch)._C._DisableTorchDispatch
"""While open, no dispatch mode sees what this thread computes. Tried: 2.13.0."""
