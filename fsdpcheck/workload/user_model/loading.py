"""A user's own model, batch, loss and optimizer: loaded by reference, once in a process; a copy for who runs a case.

``build()`` gives an ``nn.Module``; ``batch(n)``, or ``batch()``, gives (inputs, targets) with n samples along dim 0,
each one tensor; ``loss(outputs, targets)`` gives per-sample losses [n], and ``optimizer(model)`` an optimizer. What
these must be like is checked by workload/user_model/inspection.py; here nothing is.

Legend: n samples, F features of one sample's flattened output.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdpcheck.case import UserModelSpec
from fsdpcheck.loading import import_patches, references
from fsdpcheck.process_state.seeds import fixed_seeds

NEEDED = 27
"""Samples that a batch must have: nine in each of three steps, the most that are drawn (see strategies)."""

Loss = Callable[[Tensor, Tensor], Tensor]
_MODEL, _BATCH, _LOSS, _OPTIMIZER = (references.Kind(word) for word in ("model", "batch", "loss", "optimizer"))
_lock = threading.RLock()  # simulated ranks are threads


def built(ref: str) -> Any:
    """What the user's ``build()`` gives, anew, with the random streams at a fixed place."""
    with _lock, import_patches.recorded(ref):
        build = references.load(ref, _MODEL)
        with fixed_seeds():
            return build()


def model(ref: str) -> nn.Module:
    """A copy of the user's model, which is built once in a process: its own parameters, ties and modes."""
    with _lock:
        return copy.deepcopy(_prototype(ref))


def values(ref: str) -> dict[str, Tensor]:
    """The model's own parameters by name, a shared one once. Not to be changed."""
    with _lock:
        return {name: value.detach() for name, value in _prototype(ref).named_parameters()}


def convolved(ref: str) -> frozenset[str]:
    """Names of the parameters of convolutions, an output of which is a sum over all but the first axis."""
    with _lock:
        modules = _prototype(ref).named_modules()
        kinds = (nn.modules.conv._ConvNd,)
        return frozenset(f"model.{name}.weight".replace("..", ".") for name, one in modules if isinstance(one, kinds))


def drawn(ref: str, count: int) -> Any:
    """What the user's ``batch`` gives for ``count`` samples, anew, with the random streams at a fixed place."""
    with _lock, import_patches.recorded(ref):
        function = references.load(ref, _BATCH)
        with fixed_seeds():
            return function(count) if takes_count(function) else function()


def samples(ref: str, count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` samples of the user's batch: inputs [count, ...] and targets [count, ...]."""
    with _lock:
        inputs, targets = _samples(ref, max(count, NEEDED))
        return inputs[:count], targets[:count]


def loss(ref: str) -> Loss:
    """The user's loss, or the built-in one for ""."""
    with _lock:
        return _loss(ref) if ref else built_in_loss


def optimizer(ref: str) -> Callable[[nn.Module], Any]:
    """The user's function that makes an optimizer of a model."""
    with _lock:
        return _optimizer(ref)


def built_in_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """[n]: half the squared error, or for integer targets cross-entropy over the last dim, added up over positions."""
    if targets.is_floating_point():
        return 0.5 * (outputs - targets).flatten(1).square().sum(1)
    rows = nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction="none")
    return rows.reshape(len(outputs), math.prod(targets.shape[1:])).sum(1)


def load(own: UserModelSpec) -> None:
    """Import and build all of it, as far as this process has not yet: what that changes is noted (process_state)."""
    model(own.build), samples(own.batch, NEEDED), loss(own.loss)
    if own.optimizer:
        optimizer(own.optimizer)


def target_form(own: UserModelSpec) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Shape of one sample's target, and the dtype of integer targets (None: fractions, in whatever dtype is used)."""
    with _lock:
        targets = _samples(own.batch, NEEDED)[1]
        return tuple(targets.shape[1:]), None if targets.is_floating_point() else targets.dtype


def output_shape(own: UserModelSpec) -> tuple[int, ...]:
    """Shape of one sample's output."""
    with _lock:
        return _output_shape(own.build, own.batch)


def takes_count(function: Callable[..., Any]) -> bool:
    """Whether ``batch`` takes the number of samples."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return any(parameter.kind in kinds for parameter in inspect.signature(function).parameters.values())


@functools.lru_cache(maxsize=4)
def _loss(ref: str) -> Loss:
    with import_patches.recorded(ref):
        return cast(Loss, references.load(ref, _LOSS))


@functools.lru_cache(maxsize=4)
def _optimizer(ref: str) -> Callable[[nn.Module], Any]:
    with import_patches.recorded(ref):
        return cast(Callable[[nn.Module], Any], references.load(ref, _OPTIMIZER))


@functools.lru_cache(maxsize=4)
def _prototype(ref: str) -> nn.Module:
    return cast(nn.Module, built(ref))


@functools.lru_cache(maxsize=4)
def _samples(ref: str, count: int) -> tuple[Tensor, Tensor]:
    inputs, targets = drawn(ref, count)
    return inputs.detach(), targets.detach()


@functools.lru_cache(maxsize=4)
@torch.no_grad()
def _output_shape(build: str, batch: str) -> tuple[int, ...]:
    found: Tensor = _prototype(build)(_samples(batch, NEEDED)[0][:1])
    return tuple(found.shape[1:])
