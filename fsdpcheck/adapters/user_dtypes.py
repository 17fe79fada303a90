"""In which dtype a user's model computes, as its first step shows, and whether that was said.

A policy, autocast and a cast of the whole model all show in the dtypes that modules have as their forward begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from fsdpcheck.errors import AdapterError, explain

_AUTOCAST: Final = "--param-dtype autocast"
_ITS_OWN: Final = "; where your model opens it by itself, leave --param-dtype out"
_COPIES: Final = {
    torch.float32: "--param-dtype float32",
    torch.bfloat16: "--param-dtype bfloat16 --reduce-dtype float32",
}  # fmt: skip
"""What says that a model computes with copies of its parameters in a dtype."""


class Dtypes:
    """``given``: a user's model before it is made parallel. ``said``: what it is to compute in; None: in its own.

    ``autocast``: whether it is said to do so under torch.autocast.
    """

    def __init__(self, name: str, given: nn.Module, said: torch.dtype | None, autocast: bool = False) -> None:
        self._name, self._said, self._autocast = name, said, autocast
        self._modules = {path: one for path, one in given.named_modules() if _dtypes(one)}
        self._own = {path: _dtypes(one) for path, one in self._modules.items()}
        self._copies: dict[torch.dtype, str] = {}
        self._casts: dict[torch.dtype, tuple[str, str]] = {}
        self._forwards = 0

    @contextmanager
    def watched(self, made: nn.Module) -> Iterator[None]:
        """Around one step of ``made``, the parallel model.

        Raises AdapterError as it ends, where the model computed in a dtype that nobody named, or not in the one named.
        """
        hooks = [
            module.register_forward_pre_hook(functools.partial(self._see, path))
            for path, module in self._modules.items()
        ]
        hooks.append(made.register_forward_pre_hook(lambda *_: self._see_autocast("torch.autocast around the model")))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._require_said()

    def _see(self, path: str, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._forwards += 1
        if self._said is not None:  # where nothing is, a model opens autocast by itself alone as well
            self._see_autocast(f"torch.autocast around {path or 'the model'}", _ITS_OWN)
        for key, own in self._own[path].items():
            dtype = getattr(getattr(module, key, None), "dtype", own)  # in the forward of FSDP1 it is no Parameter
            if dtype != own:
                self._copies.setdefault(dtype, f"{path}.{key}" if path else key)

    def _see_autocast(self, where: str, then: str = "") -> None:
        if not torch.compiler.is_compiling() and torch.is_autocast_enabled("cpu"):
            self._casts.setdefault(torch.get_autocast_dtype("cpu"), (where, then))

    def _require_said(self) -> None:
        for dtype, (where, own) in self._casts.items():
            if dtype != self._said or not self._autocast:
                then = f"{_say(_AUTOCAST)}{own}" if dtype == torch.bfloat16 else _other_than(dtype)
                raise self._refusal(f"{dtype} under torch.autocast", then, where)
        for dtype, where in self._copies.items():
            if dtype != self._said:
                raise self._refusal(dtype, _say(_COPIES[dtype]) if dtype in _COPIES else _other_than(dtype), where)
        if self._said is not None and self._forwards and not self._casts:
            if self._autocast and self._copies:
                raise self._refusal(f"copies in {self._said}", _say(_COPIES[self._said]), self._copies[self._said])
            if not self._copies:
                by = "run the model under torch.autocast" if self._autocast else "pass the policy"
                raise self._refusal("the dtype of its parameters", f"{by}, or leave --param-dtype out")

    def _refusal(self, got: object, then: str, where: str = "") -> AdapterError:
        what = f"the functions of {self._name!r} and the dtype that the model computes in"
        wanted = "the dtype of its parameters, since nothing else is said"
        if self._said is not None:
            wanted = f"{self._said}{' under torch.autocast' * self._autocast}"
        return AdapterError(explain(what, got=got, wanted=wanted, where=where, then=then))


def _say(words: str) -> str:
    return f"say so: {words}; or leave it out where fsdpcheck judges"


def _other_than(dtype: torch.dtype) -> str:
    return f"compute in another than {str(dtype).removeprefix('torch.')}"


def _dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Of the parameters that the module has itself."""
    return {key: value.dtype for key, value in module.named_parameters(recurse=False) if value.is_floating_point()}
