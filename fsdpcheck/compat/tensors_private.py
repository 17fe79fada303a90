"""Where torch makes tensors, casts modules and drops out, past what can be seen of operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional
from torch import Tensor

from fsdpcheck.compat.torch_private import replaced

Wrapped = Callable[[Callable[..., Any]], Callable[..., Any]]


@functools.cache
def unwraps_itself(kind: type) -> bool:
    """Whether operators on tensors of this type call operators on what those wrap. Tried: 2.13.0."""
    dispatch = getattr(kind, "__torch_dispatch__", None)
    disabled = cast(Any, torch)._C._disabled_torch_dispatch_impl
    return dispatch is not None and dispatch is not disabled and not is_fake(kind)


@functools.cache
def is_fake(kind: type) -> bool:
    """Whether tensors of this type have a shape and a type, and no values. Tried: 2.13.0."""
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(kind, FakeTensor)


@contextmanager
def rebuilt_through(rebuilt: Callable[..., Tensor]) -> Iterator[None]:
    """While open, ``rebuilt(rebuild, *args)`` makes the tensors of files and of other processes. Tried: 2.13.0."""
    utils = cast(Any, torch)._utils
    rebuild = utils._rebuild_tensor

    @functools.wraps(rebuild)
    def rebuild_ours(*args: Any) -> Tensor:
        return rebuilt(rebuild, *args)

    with replaced(utils, _rebuild_tensor=rebuild_ours):
        yield


@contextmanager
def around_casts_of_modules(opened: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While open, ``opened()`` is entered round ``module.to()``, ``half()`` and their like. Tried: 2.13.0."""
    apply: Any = torch.nn.Module._apply

    @functools.wraps(apply)
    def applied(module: Any, *args: Any, **options: Any) -> Any:
        with opened():
            return apply(module, *args, **options)

    with replaced(torch.nn.Module, _apply=applied):
        yield


@contextmanager
def dropouts_replaced(simple: Wrapped, attention: Wrapped, recurrent: Wrapped) -> Iterator[None]:
    """While open, what drops out is called through these. Tried: 2.13.0.

    ``simple``: of functions of (input, p, training). ``attention``: of scaled_dot_product_attention. ``recurrent``: of
    the networks that torch has in C++. torch.nn.functional calls the first and the last of torch._VF.
    """
    kinds = [
        f"{before}dropout{after}" for before in ("", "alpha_", "feature_", "feature_alpha_") for after in ("", "_")
    ]
    kinds.append("native_dropout")
    networks = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    with ExitStack() as stack:
        for owner in (torch, cast(Any, torch)._VF):
            changed = {name: simple(getattr(owner, name)) for name in kinds}
            changed |= {name: recurrent(getattr(owner, name)) for name in networks}
            stack.enter_context(_added(owner, changed))
        for owner in (torch.nn.functional, cast(Any, torch)._C._nn):
            name = "scaled_dot_product_attention"
            stack.enter_context(replaced(owner, **{name: attention(getattr(owner, name))}))
        yield


@contextmanager
def _added(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Like ``replaced``, of an owner that finds its attributes elsewhere where it has none of that name."""
    kept = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in kept:
                setattr(owner, name, kept[name])
            else:
                delattr(owner, name)
