"""Entrances: where tensors, and modules, come to be past the operators that a mode sees. Patched once for all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.comparison.precision import dropout, exactness, notes
from fsdpcheck.comparison.precision.batch_statistics import by_averages
from fsdpcheck.comparison.precision.higher_precision import wide_by_default
from fsdpcheck.comparison.precision.operators import WIDE
from fsdpcheck.compat import dispatch_private, tensors_private
from fsdpcheck.compat.torch_private import replaced

_OF_PYTHON: Final = ("tensor", "as_tensor", "asarray", "frombuffer")
_COMPUTED_INITIAL: Final = ("trunc_normal_", "orthogonal_")
"""Initializers that compute with what they draw."""


@contextmanager
def installed() -> Iterator[None]:
    """While open, threads that enter an arithmetic have all that they make in it; for others nothing changes.

    Round the whole run, on the thread that starts it: torch's modules are those of all ranks.
    """
    init: Any = torch.nn.init
    with ExitStack() as stack:
        made = {name: _raised(getattr(torch, name)) for name in _OF_PYTHON}
        made |= {name: _entering(getattr(torch, name)) for name in ("from_numpy", "from_dlpack")}
        stack.enter_context(replaced(torch, **made, compile=_uncompiled(torch.compile)))
        stack.enter_context(replaced(torch, batch_norm=by_averages(torch.batch_norm)))
        stack.enter_context(replaced(Tensor, new_tensor=_raised(Tensor.new_tensor)))
        stack.enter_context(replaced(init, **{name: _in_own_type(getattr(init, name)) for name in _COMPUTED_INITIAL}))
        stack.enter_context(tensors_private.rebuilt_through(_rebuilt))
        stack.enter_context(tensors_private.around_casts_of_modules(notes.casting_module))
        stack.enter_context(dropout.switched_off())
        yield


def _raised(make: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers of Python are not rounded to the type that the script wants of them."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        if not notes.is_raised():
            return make(*args, **options)
        if make is not _FROMBUFFER:  # whose type says how to read
            args = tuple(_type(value) for value in args)
            options = {name: _type(value) for name, value in options.items()}
        with wide_by_default():
            found = _wide(make(*args, **options))
        exactness.entered(found)
        return found

    return made


def _entering(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What shares its memory with others."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Tensor:
        found = make(*args, **options)
        exactness.entered(found)
        return found

    return made


_FROMBUFFER: Final = torch.frombuffer


def _type(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _wide(tensor: Tensor) -> Tensor:
    if tensor.dtype not in WIDE:
        return tensor
    with dispatch_private.undispatched():
        return tensor.detach().to(WIDE[tensor.dtype]).requires_grad_(tensor.requires_grad)


def _rebuilt(rebuild: Callable[..., Tensor], *args: Any) -> Tensor:
    """A tensor of a file, or of another process: its bytes are of the type that it was saved in."""
    if not notes.is_raised():
        return rebuild(*args)
    with dispatch_private.undispatched():
        made = rebuild(*args)
    exactness.entered(made)
    return _wide(made)


def _in_own_type(initialize: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """So that raised parameters begin as the script's do, also where they are computed of what is drawn."""

    @functools.wraps(initialize)
    def initialized(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if not notes.is_raised() or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype != torch.float64:
            return initialize(tensor, *args, **options)
        with torch.no_grad():
            with dispatch_private.undispatched():
                made = initialize(tensor.detach().float(), *args, **options).double()
                if exactness.here() is not None:
                    size = args[1] if len(args) > 1 else options.get("std", 1.0)  # of orthogonal_ it is none
                    exactness.round_down(made, exactness.unit_of(size, 2))
            tensor.copy_(made)
        return tensor

    return initialized


def _uncompiled(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code calls no operators that a mode could see."""

    @functools.wraps(compiled)
    def uncompiled(model: Any = None, **options: Any) -> Any:
        if not notes.are_taken():
            return compiled(model, **options)
        notes.note("torch.compile is off")
        return model if model is not None else lambda later: later

    return uncompiled
