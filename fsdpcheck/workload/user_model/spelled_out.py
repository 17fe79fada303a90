"""Functions that a user's model spells out, in place within the forward of its modules and nowhere else.

Each module has a pair of hooks, for forwards are run again by parts: by activation checkpointing, by the stages of a
pipeline. What an implementation calls outside of forwards is torch's own. So are dtypes widened that the model names.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdpcheck.case import UserModelSpec
from fsdpcheck.exact.surrogates import spelled_out
from fsdpcheck.workload.user_model.dtype_widening import widened

_SQUARES = "_fsdpcheck_squares"
"""Attribute of a root: (what it is the root of, whether it is the inverse)."""


class _Inside(threading.local):
    """Of one thread, which is one rank: what is in place, and how many modules are running forward."""

    def __init__(self) -> None:
        self.depth = 0
        self.stack = ExitStack()


_inside = _Inside()


class SpelledOut(TorchFunctionMode):
    """Inside, torch's roots, cosines, sines and top-k are those of the grid."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = in_place_of(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if given is None else given


def in_place_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What stands for this call of a function of torch; None where it is torch's own."""
    replaced = _REPLACED.get(func)
    return None if replaced is None else replaced(*args, **kwargs)


def attach(model: nn.Module, own: UserModelSpec, surrogates: bool) -> None:
    """Have each module of ``model`` run its forward so, under whatever wraps it; dtypes are widened in any case."""
    for module in model.modules():
        module.register_forward_pre_hook(functools.partial(_enter, own, surrogates))
        module.register_forward_hook(_leave, always_call=True)


def _enter(own: UserModelSpec, surrogates: bool, module: nn.Module, given: Any) -> None:
    if not _inside.depth:
        dtype = next((value.dtype for value in (*module.parameters(), *_tensors(given))), torch.float32)
        if surrogates:
            _inside.stack.enter_context(SpelledOut())
        _inside.stack.enter_context(widened(own, dtype))
    _inside.depth += 1


def _leave(*_: Any) -> None:
    _inside.depth -= 1
    if not _inside.depth:
        _inside.stack.close()


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _of_one(operator: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """``operator`` of a tensor of real numbers; None stands for torch's own function."""

    def found(x: Any, *rest: Any, **named: Any) -> Tensor | None:
        plain = isinstance(x, Tensor) and x.is_floating_point() and not rest and not named
        return operator(x) if plain else None

    return found


def _root(x: Tensor) -> Tensor:
    return _marked(spelled_out.root(x), x, False)


def _inverse_root(x: Tensor) -> Tensor:
    return _marked(spelled_out.inverse_root(x), x, True)


def _marked(root: Tensor, squares: Tensor, inverse: bool) -> Tensor:
    setattr(root, _SQUARES, (squares.detach(), inverse))
    return root


def _power(x: Any, exponent: Any = None, **named: Any) -> Tensor | None:
    """x ** 0.5 and x ** -0.5 are roots."""
    root = {0.5: _root, -0.5: _inverse_root}.get(exponent if isinstance(exponent, float) else 0.0)
    found: Tensor | None = _of_one(root)(x, **named) if root is not None else None
    return found


def _product(x: Any, y: Any, **named: Any) -> Tensor | None:
    """A normalisation, where one is an inverse root."""
    return _normalised(x, y, True, named) if hasattr(y, _SQUARES) else _normalised(y, x, True, named)


def _quotient(x: Any, y: Any, **named: Any) -> Tensor | None:
    return _normalised(x, y, False, named)


def _normalised(x: Any, root: Any, inverse: bool, named: dict[str, Any]) -> Tensor | None:
    squares, is_inverse = getattr(root, _SQUARES, (None, not inverse))
    if squares is None or named or is_inverse != inverse or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if x.dim() != squares.dim() or any(b not in (1, a) for a, b in zip(x.shape, squares.shape, strict=True)):
        return None
    return cast(Tensor, spelled_out.over_root(x, squares))


def _top_k(x: Any, *rest: Any, out: Any = None, **named: Any) -> Any:
    if out is not None or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    return torch.return_types.topk(spelled_out.top_k(x, *rest, **named))


_BY_NAME: Final[dict[str, Callable[..., Any]]] = {
    "rsqrt": _of_one(_inverse_root), "sqrt": _of_one(_root), "pow": _power, "topk": _top_k,
    "cos": _of_one(spelled_out.cosine), "sin": _of_one(spelled_out.sine), "mul": _product, "div": _quotient,
    "__pow__": _power, "__mul__": _product, "__rmul__": _product, "__truediv__": _quotient,
}  # fmt: skip
_REPLACED: Final[dict[Any, Callable[..., Any]]] = {
    getattr(home, name): replaced
    for name, replaced in _BY_NAME.items()
    for home in (torch, Tensor)
    if hasattr(home, name)
}
