"""Functions of torch that tell an observer what they are given and return, replaced once for all ranks of a process."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdpcheck.compat.torch_private import replaced

_LOSSES: Final = ("target", "targets")
_NORMS: Final = ("clip_grad_norm_", "clip_grad_norm", "get_total_norm")
_LATE: Final = {
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "clip_grad_norm_"): "norm",
    ("torch.distributed.checkpoint.state_dict_saver", "", "_save_state_dict"): "save_distributed",
}
"""What a script may import later: module, class and name, and how it is told."""


class Listener(Protocol):
    """What a rank is told; ``call`` makes the call that it wraps."""

    def made(self, optimizer: torch.optim.Optimizer) -> None: ...

    def loss(self, tensors: object) -> None: ...

    def labels(self, call: Callable[[], Any], target: object) -> Any: ...

    def norm(self, call: Callable[[], Any]) -> Any: ...

    def save(self, call: Callable[[], Any], value: object, file: object) -> Any: ...

    def save_distributed(self, call: Callable[[], Any], value: object, writer: object) -> Any: ...


class Functions:
    """Tells the listener of the rank that calls."""

    def __init__(self, listener: Callable[[], Listener | None]) -> None:
        self._listener = listener
        self._late: set[tuple[str, str, str]] = set()
        self._undo: ExitStack | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, they are replaced."""
        with ExitStack() as self._undo:
            for name, function in list(vars(F).items()):
                if (place := _place_of_target(name, function)) is not None:
                    self._replace(F, name, functools.partial(self._of_loss, place))
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in _NORMS:
                    if hasattr(owner, name):
                        self._replace(owner, name, self._of_norm)
            self._replace(torch.autograd, "backward", self._of_backward)
            self._replace(torch.optim.Optimizer, "__init__", self._of_optimizer)
            for owner in (torch, torch.serialization):
                self._replace(owner, "save", self._of_save)
            self.look_for_more()
            yield
        self._undo = None
        self._late.clear()

    def look_for_more(self) -> None:
        """Replace what has been imported since."""
        if len(self._late) == len(_LATE) or self._undo is None:
            return
        ways = {"norm": self._of_norm, "save_distributed": self._of_save_distributed}
        for entry, way in _LATE.items():
            module, kind, name = entry
            owner = sys.modules.get(module)
            owner = getattr(owner, kind, None) if kind else owner
            if entry not in self._late and owner is not None and hasattr(owner, name):
                self._late.add(entry)
                self._replace(owner, name, ways[way])

    def _replace(self, owner: Any, name: str, way: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or (listener := self._listener()) is None:
                return real(*args, **kwargs)
            return way(listener, functools.partial(real, *args, **kwargs), args, kwargs)

        assert self._undo is not None
        self._undo.enter_context(replaced(owner, **{name: ours}))

    @staticmethod
    def _of_loss(place: tuple[int, str], listener: Listener, call: Any, args: Any, kwargs: Any) -> Any:
        number, name = place
        return listener.labels(call, args[number] if len(args) > number else kwargs.get(name))

    @staticmethod
    def _of_norm(listener: Listener, call: Any, args: Any, kwargs: Any) -> Any:
        return listener.norm(call)

    @staticmethod
    def _of_backward(listener: Listener, call: Any, args: Any, kwargs: Any) -> Any:
        listener.loss(args[0] if args else kwargs.get("tensors"))
        return call()

    @staticmethod
    def _of_optimizer(listener: Listener, call: Any, args: Any, kwargs: Any) -> Any:
        listener.made(args[0])
        return call()

    @staticmethod
    def _of_save(listener: Listener, call: Any, args: Any, kwargs: Any) -> Any:
        value, file = (*args, *(kwargs.get(name) for name in ("obj", "f")[len(args) :]))[:2]
        return listener.save(call, value, file)

    @staticmethod
    def _of_save_distributed(listener: Listener, call: Any, args: Any, kwargs: Any) -> Any:
        value, writer = (*args, *(kwargs.get(name) for name in ("state_dict", "storage_writer")[len(args) :]))[:2]
        return listener.save_distributed(call, value, writer)


def _place_of_target(name: str, function: object) -> tuple[int, str] | None:
    """Which argument of a loss function is its target, and what that is called; None of what is no such function."""
    if name.startswith("_") or not inspect.isfunction(function):
        return None
    names = list(inspect.signature(function).parameters)
    return next(((names.index(target), target) for target in _LOSSES if target in names), None)


def scalars(tensors: object) -> list[Tensor]:
    """The losses among what a backward is called on: tensors of one value."""
    several = tensors if isinstance(tensors, list | tuple) else (tensors,)
    return [one for one in several if isinstance(one, Tensor) and one.numel() == 1]
