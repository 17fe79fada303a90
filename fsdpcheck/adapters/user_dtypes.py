"""In which dtype a user's model computes, as its first step shows, and whether that was said.

A policy, autocast and a cast of the whole model all show in the dtypes that modules have as their forward begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdpcheck.errors import AdapterError, explain

_THEN = "say so: --param-dtype {name} --reduce-dtype float32; or leave it out where fsdpcheck judges"


class Dtypes:
    """``given``: a user's model before it is made parallel. ``said``: what it is to compute in; None: in its own."""

    def __init__(self, name: str, given: nn.Module, said: torch.dtype | None) -> None:
        self._name, self._said = name, said
        self._modules = {path: one for path, one in given.named_modules() if _dtypes(one)}
        self._own = {path: _dtypes(one) for path, one in self._modules.items()}
        self._other: dict[torch.dtype, str] = {}
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
        hooks.append(made.register_forward_pre_hook(self._see_autocast))
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
        for key, own in self._own[path].items():
            dtype = getattr(getattr(module, key, None), "dtype", own)  # in the forward of FSDP1 it is no Parameter
            if dtype != own:
                self._other.setdefault(dtype, f"{path}.{key}" if path else key)

    def _see_autocast(self, module: nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling() and torch.is_autocast_enabled("cpu"):
            self._other.setdefault(torch.get_autocast_dtype("cpu"), "torch.autocast around the model")

    def _require_said(self) -> None:
        what = f"the functions of {self._name!r} and the dtype that the model computes in"
        for dtype, where in self._other.items():
            if dtype != self._said:
                name = str(dtype).removeprefix("torch.")
                wanted = str(self._said or "the dtype of its parameters, since nothing else is said")
                then = _THEN.format(name=name) if name in ("float32", "bfloat16") else f"compute in another than {name}"
                raise AdapterError(explain(what, got=dtype, wanted=wanted, where=where, then=then))
        if self._said is not None and self._forwards and not self._other:
            then = "pass the policy, or leave --param-dtype out"
            raise AdapterError(explain(what, got="the dtype of its parameters", wanted=self._said, then=then))


def _dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Of the parameters that the module has itself."""
    return {key: value.dtype for key, value in module.named_parameters(recurse=False) if value.is_floating_point()}
