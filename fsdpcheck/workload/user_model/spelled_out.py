"""Functions that a user's model spells out, in place within the forward of its modules and nowhere else.

Each module has a pair of hooks, for forwards are run again by parts: by activation checkpointing, by the stages of a
pipeline. A module of a class that is not torch's has them besides where its ``forward`` is called without its hooks, as
one that takes per-sample gradients of a layer by itself does. What an implementation calls outside of forwards is
torch's own. So are dtypes widened that the model names.
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
from fsdpcheck.exact.surrogates.grids import FINE, Grid
from fsdpcheck.exact.surrogates.spelled_out import SQUARES, TOTAL
from fsdpcheck.workload.user_model import loading as user_model
from fsdpcheck.workload.user_model.dtype_widening import widened

_ATTACHED = "_fsdpcheck_attached"
"""Attribute of a module: what ``_enter`` needs of it; and of a class's ``forward`` that looks for it."""
_NOTHING: Final = 1e-5
"""What is added to a total, or is its least value, to keep a quotient finite: no more is taken for nothing."""


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


@functools.cache
def tables(build: str, turn: Grid = FINE.turn) -> dict[str, Tensor]:
    """Of the model that ``build`` names the buffers that look like tables of cosines, rounded as these are.

    See exact/surrogates/spelled_out.py. Not to be changed.
    """
    buffers = user_model.model(build).named_buffers(remove_duplicate=False)
    return {name: spelled_out.rounded_table(buffer, turn) for name, buffer in buffers if spelled_out.is_table(buffer)}


def round_tables_(model: nn.Module, build: str, turn: Grid) -> None:
    """Put these values into a copy of that model, of any dtype."""
    for name, value in tables(build, turn).items():
        model.get_buffer(name).copy_(value)


def in_place_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What stands for this call of a function of torch; None where it is torch's own."""
    replaced = _REPLACED.get(func) or _MARKED.get(func)
    return None if replaced is None else replaced(*args, **kwargs)


def marked(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch's own value of a call, marked by what it is; None where none is to be marked."""
    marks = _MARKED.get(func)
    return None if marks is None else marks(*args, **kwargs)


def attach(model: nn.Module, own: UserModelSpec, surrogates: bool) -> None:
    """Have each module of ``model`` run its forward so, under whatever wraps it; dtypes are widened in any case."""
    for module in model.modules():
        module.register_forward_pre_hook(functools.partial(_enter, own, surrogates))
        module.register_forward_hook(_leave, always_call=True)
        if not type(module).__module__.startswith("torch."):
            module.__dict__[_ATTACHED] = (own, surrogates)
            _enter_by_forward(type(module))


def _enter_by_forward(kind: type[nn.Module]) -> None:
    """Have ``forward`` of the class's modules that are attached run so too; its other modules are as before."""
    plain = kind.forward
    if hasattr(plain, _ATTACHED):
        return

    @functools.wraps(plain)
    def forward(self: nn.Module, *positional: Any, **keywords: Any) -> Any:
        attached = self.__dict__.get(_ATTACHED)
        if attached is None:
            return plain(self, *positional, **keywords)
        own, surrogates = attached
        _enter(own, surrogates, self, positional)
        try:
            return plain(self, *positional, **keywords)
        finally:
            _leave()

    setattr(forward, _ATTACHED, True)
    kind.forward = forward


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
    setattr(root, SQUARES, (squares.detach(), inverse))
    return root


def _power(x: Any, exponent: Any = None, **named: Any) -> Tensor | None:
    """x ** 0.5 and x ** -0.5 are roots."""
    root = {0.5: _root, -0.5: _inverse_root}.get(exponent if isinstance(exponent, float) else 0.0)
    found: Tensor | None = _of_one(root)(x, **named) if root is not None else None
    return found


def _product(x: Any, y: Any, **named: Any) -> Tensor | None:
    """A normalisation, where one is an inverse root; of complex numbers, where one is."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and (x.is_complex() or y.is_complex()) and not named:
        return spelled_out.product_of_complex(x, y)
    return _normalised(x, y, True, named) if hasattr(y, SQUARES) else _normalised(y, x, True, named)


def _quotient(x: Any, y: Any, **named: Any) -> Tensor | None:
    return _shares(x, y, named) if hasattr(y, TOTAL) else _normalised(x, y, False, named)


def _quotient_in_place(x: Any, y: Any, **named: Any) -> Tensor | None:
    shares = _shares(x, y, named)
    return None if shares is None else cast(Tensor, x).copy_(shares)


def _total(x: Any, *dims: Any, **named: Any) -> Tensor | None:
    """A sum that keeps its dims, marked."""
    kept = dims[1:] == (True,) or named.get("keepdim")
    if not kept or not isinstance(x, Tensor) or not x.is_floating_point() or "out" in named:
        return None
    total = torch.sum(x, *dims, **named)
    setattr(total, TOTAL, True)
    return total


def _hardly_more(x: Any, least: Any = None, **named: Any) -> Tensor | None:
    """A total itself, to which next to nothing is added, or below which it may not fall, so that none divides by 0."""
    least = named.pop("min", least)
    same = hasattr(x, TOTAL) and not named and isinstance(least, float) and abs(least) <= _NOTHING
    return cast(Tensor, x) if same else None


def _shares(x: Any, total: Any, named: dict[str, Any]) -> Tensor | None:
    if not hasattr(total, TOTAL) or named or not _along(x, total):
        return None
    return cast(Tensor, spelled_out.share(x, total))


def _along(x: Any, other: Tensor) -> bool:
    """Whether x is a tensor of real numbers, and the other as long, or 1, along each of its dims."""
    real = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == other.dim()
    return real and all(b in (1, a) for a, b in zip(x.shape, other.shape, strict=True))


def _normalised(x: Any, root: Any, inverse: bool, named: dict[str, Any]) -> Tensor | None:
    squares, is_inverse = getattr(root, SQUARES, (None, not inverse))
    if squares is None or named or is_inverse != inverse or not _along(x, squares):
        return None
    return cast(Tensor, spelled_out.over_root(x, squares))


def _polar(size: Any, angle: Any, out: Any = None) -> Tensor | None:
    return None if out is not None else spelled_out.polar(size, angle)


def _top_k(x: Any, *rest: Any, out: Any = None, **named: Any) -> Any:
    if out is not None or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    return torch.return_types.topk(spelled_out.top_k(x, *rest, **named))


_BY_NAME: Final[dict[str, Callable[..., Any]]] = {
    "rsqrt": _of_one(_inverse_root), "sqrt": _of_one(_root), "pow": _power, "topk": _top_k, "polar": _polar,
    "cos": _of_one(spelled_out.cosine), "sin": _of_one(spelled_out.sine), "mul": _product, "div": _quotient,
    "__pow__": _power, "__mul__": _product, "__rmul__": _product, "__truediv__": _quotient, "div_": _quotient_in_place,
    "__itruediv__": _quotient_in_place,
}  # fmt: skip
_MARKS: Final[dict[str, Callable[..., Any]]] = {
    "sum": _total, **dict.fromkeys(("add", "add_", "__add__", "__iadd__", "clamp", "clamp_min"), _hardly_more),
}  # fmt: skip


def _by_function(names: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """By the functions and methods of torch that have these names."""
    homes = (torch, Tensor)
    return {getattr(home, name): own for name, own in names.items() for home in homes if hasattr(home, name)}


_REPLACED: Final = _by_function(_BY_NAME)
_MARKED: Final = _by_function(_MARKS)
