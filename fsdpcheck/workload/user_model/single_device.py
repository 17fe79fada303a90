"""A user's model alone: forward and backward on a single device as a rank runs them, and which dtypes they name.

What raises here raises in plain PyTorch, so that no implementation can be blamed for it.

Legend: n samples.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.case import Named
from fsdpcheck.compat import frames_private
from fsdpcheck.errors import UsageError
from fsdpcheck.workload.user_model import casting
from fsdpcheck.workload.user_model import loading as user_model
from fsdpcheck.workload.user_model.loading import Loss

SIZES: Final = (1, 2, 3, 9)
"""Samples of the forwards that are tried: those of micro-batches lie between."""
_NARROW: Final[dict[torch.dtype, Named]] = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip
"""Dtypes that round where float64 does not, the narrowest first."""


@dataclass(frozen=True)
class Stumble:
    """What a model raised: ``error``, and ``where``: its module, the operator with its dtypes, the user's own line."""

    error: str
    where: str


@dataclass
class Alone:
    """What one model did in one dtype. ``named``: narrower dtypes that it computed in, and where each came up first."""

    stumble: Stumble | None = None
    named: dict[Named, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stepped:
    """The narrowest dtype that a model computes in although all it is given is wider ("" if none), and where.

    ``fails_in_float32``: what it raises there alone, "" if nothing.
    """

    names: Named
    where: str
    fails_in_float32: str


def stepped(build: str, loss: str, inputs: Tensor, targets: Tensor) -> Stepped:
    """What the model does in each dtype that cases have. Raises UsageError where a single device raises in all."""
    in64, in32 = (
        steps(user_model.model(build), user_model.loss(loss), inputs, targets, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    names, where = _named(in64, in32)
    if in32.stumble is not None and (names or in64.stumble is not None):
        tried = "float32, whose dtype it names" if names else "float64 and in float32"
        raise UsageError(
            f"model {build!r} raises on a single device that runs it as a rank does, in {tried}\n"
            f"  got     {in32.stumble.error}\n"
            f"  wanted  a forward, a loss and a backward of {', '.join(map(str, SIZES))} samples, with parameters and"
            f" inputs of one dtype\n"
            f"  where   {in32.stumble.where}\n"
            "  next    ask tensors for their dtype (x.to(self.weight.dtype)) instead of naming one; no implementation"
            " can be blamed for this"
        )
    return Stepped(names, where, "" if in32.stumble is None else in32.stumble.error)


def steps(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Alone:
    """Forwards and backwards of SIZES samples of a ``model`` that is cast to ``dtype``, as its inputs are."""
    found, model = Alone(), casting.cast(model, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inputs, targets = (part.to(dtype) if part.is_floating_point() else part for part in (inputs, targets))
    for size in SIZES:
        with watched(model, dtype, found):
            losses = loss(model(inputs[:size]).to(dtype), targets[:size])
            if losses.requires_grad:
                torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        if found.stumble is not None:
            break
    return found


@contextmanager
def watched(model: nn.Module, dtype: torch.dtype, found: Alone) -> Iterator[None]:
    """Note in ``found`` which narrower dtypes come up inside, and what is raised, which ends the block."""
    with followed(model) as at:
        seen = _Operators(dtype, at, found)
        try:
            with seen:
                yield
        except Exception as error:
            found.stumble = Stumble(message(error), ", ".join(filter(None, (_module(at), seen.newest, line_of(error)))))


def _named(in64: Alone, in32: Alone) -> tuple[Named, str]:
    """What a model makes of integers or of nothing is no name: beside what it is given it is promoted, or raises."""
    for name in _NARROW.values():
        for run in (in64, in32):
            if name in run.named:
                return name, run.named[name]
    return ("float32", in64.stumble.where) if in64.stumble and not in32.stumble else ("", "")


def message(error: BaseException) -> str:
    """Kind and words of an exception, as a traceback ends."""
    return "".join(traceback.format_exception_only(error)).strip()


@contextmanager
def followed(model: nn.Module) -> Iterator[list[str]]:
    """The modules of ``model`` whose forward is running, the innermost last; one that raises stays."""
    at: list[str] = []
    hooks = [hook for name, module in model.named_modules() for hook in _followed(at, name, module)]
    try:
        yield at
    finally:
        for hook in hooks:
            hook.remove()


def _followed(at: list[str], name: str, module: nn.Module) -> list[Any]:
    label = f"{name or 'the model'} ({type(module).__name__})"
    enter: Callable[..., None] = lambda *_: at.append(label)  # noqa: E731
    leave: Callable[..., None] = lambda *_: at.remove(label)  # noqa: E731
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _module(at: list[str]) -> str:
    return f"module {at[-1]}" if at else "the loss, or the backward"


def line_of(error: BaseException) -> str:
    """file:line of the innermost frame that is the user's; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frames_private.is_plumbing(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the operators inside: the newest, and those whose result is narrower than all that they are given."""

    def __init__(self, dtype: torch.dtype, at: list[str], found: Alone) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.newest = ""
        self._dtype, self._at, self._found = dtype, at, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value.dtype for value in _floating(args)]
        words = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in given))
        self.newest = f"operator {func} on {words or 'no floating-point tensor'}"
        result = func(*args, **(kwargs or {}))
        for value in _floating((result,)):
            if self._dtype in given and value.dtype != self._dtype and value.dtype in _NARROW:
                where = f"{_module(self._at)}, {self.newest}"
                self._found.named.setdefault(_NARROW[value.dtype], where)
        return result


def _floating(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _floating(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield value
