"""Tensors that have shapes and no values: a program runs with a model of any size, and computes nothing.

torch's FakeTensorMode gives the shapes. Integers and flags that come of none of these tensors are computed as they are:
positions, token numbers, the ranks of a mesh. What a program reads out of a tensor without values, a loss to print say,
is made up: it is 1, and counted by line; who looks for NaN or an infinite number finds none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdpcheck.compat import fake_private, functional_private
from fsdpcheck.compat.observers_private import computed_by_modes
from fsdpcheck.compat.tensors_private import is_fake, unwraps_itself
from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.simulation.scheduler import where

_PLUMBING: Final = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Where torch calls a dispatch mode from."""
_OURS: Final = str(Path(__file__).parent)
_LOOKS_FOR_INF: Final = "torch/amp/grad_scaler.py"
"""It steps if what it reads is 0."""
_OF_INTEGERS: Final = ("arange", "randint", "randperm", "tril_indices", "triu_indices")
_FILLED: Final = ("full", "scalar_tensor")
_NOT: Final = ("isnan", "isinf")
"""Operators whose answer is no, as far as a program asks."""
_AS_BEFORE: Final = ("any", "all", "logical_or", "bitwise_or", "view", "detach", "reshape", "_to_copy", "squeeze")
_IS_NOT: Final = "_fsdpcheck_is_not"
"""Mark of a tensor whose answer is no."""


class ShapesAlone:
    """``asked``: the lines that have asked for a value, and how often."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    @contextmanager
    def in_place(self, forget: Callable[[], object]) -> Iterator[None]:
        """While open, floating-point tensors that this thread makes have no values. ``forget`` drops weak references to
        parameters, which torch does not convert where there are any."""
        with computed_by_modes(), fake_private.without_values(forget), _WithoutValues(self.asked):
            yield


class _WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands before FakeTensorMode: answers for it, or goes round it."""

    def __init__(self, asked: Counter[str]) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self._asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.prim.device.default and _is_fake(args[0]):  # asked of each of a tensor's 4,096 pieces
            return args[0].fake_device
        tensors = [value for value in tree_leaves((args, options)) if isinstance(value, Tensor)]
        if any(map(_wraps, tensors)):
            return NotImplemented  # it calls operators on what it wraps, and these come here
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            asks = _asks(sys._getframe(1))
            self._asked[_line(asks)] += 1
            if asks.f_code.co_filename.endswith(_LOOKS_FOR_INF):
                return 0.0
            return getattr(args[0], _IS_NOT, None) is None and _one(args[0].dtype)
        if functional_private.is_one(func):
            return _by_its_group(func)(*args, **options)
        if _is_of_integers(func, tensors, args, options):
            with unset_fake_temporarily():
                return func(*args, **options)
        found = func(*args, **options)
        name = func.overloadpacket.__name__
        if name in _NOT or (name in _AS_BEFORE and any(hasattr(one, _IS_NOT) for one in tensors)):
            setattr(found, _IS_NOT, True)
        return found


def _is_fake(tensor: Tensor) -> bool:
    return is_fake(type(tensor))


def _wraps(tensor: Tensor) -> bool:
    return unwraps_itself(type(tensor))


def _by_its_group(func: Any) -> Callable[..., Any]:
    """Raises NotSupported for a functional collective that is not known."""
    found = functional_private.by_its_group(func)
    if found is None:
        got, then = str(func), "run it with values"
        raise NotSupported(explain("this functional collective has no form without values", got=got, then=then))
    return found


def _asks(frame: FrameType) -> FrameType:
    """What asks, of the program or of a library."""
    asks = frame
    while asks.f_back is not None and (asks.f_code.co_filename.endswith(_PLUMBING) or _OURS in asks.f_code.co_filename):
        asks = asks.f_back
    return asks


def _line(asks: FrameType) -> str:
    """The line of the program, and the line of torch that asks on its behalf."""
    at, inner = where(asks), f"{asks.f_code.co_filename}:{asks.f_lineno}"
    return at if at == inner else f"{at}, by {inner.rpartition('site-packages/')[2]}"


def _is_of_integers(func: Any, tensors: list[Tensor], args: Any, options: dict[str, Any]) -> bool:
    """Whether an operator has to do with integers and flags alone, all of which have values."""
    if tensors:
        return not any(_is_fake(one) or _has_fractions(one.dtype) for one in tensors)
    dtype, name = options.get("dtype"), func.overloadpacket.__name__
    if dtype is None:
        return name in _OF_INTEGERS or (name in _FILLED and isinstance(args[-1], int))
    return not _has_fractions(dtype)


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _one(dtype: torch.dtype) -> bool | float | complex:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1 + 0j if dtype.is_complex else 1
