"""Has the optimizers of a rank given what those of another training were given, and notes what they would have been.

From the optimizer's call on, all that a training does is then a function of the same releases. Gradients are exchanged
in place, right before the optimizer runs, and put back behind it: a trainer shows its own. Hooks that an implementation
has the optimizer call before it, one that divides by N say, come before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdpcheck.compat.torch_private import is_dtensor
from fsdpcheck.execution import RankResult
from fsdpcheck.execution.releases import Release

_OPTIONS = ("lr", "momentum", "weight_decay", "betas", "eps")


class Releases:
    """One rank's. ``step()``: the step that is being taken. ``forced``: this rank's of the other training, if any."""

    def __init__(self, result: RankResult, step: Callable[[], int], forced: Sequence[Release] = ()) -> None:
        self._result, self._step = result, step
        self._forced = {(release.step, place): release for release, place in zip(forced, _places(forced), strict=True)}
        self._calls: Counter[int] = Counter()
        self._seen: list[tuple[torch.optim.Optimizer, Callable[..., None], RemovableHandle]] = []

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Stand around each call of ``optimizer``."""
        own: list[Tensor | None] = []

        def before(*_: object) -> None:
            held = _held(optimizer)
            own[:] = [_copy(parameter.grad) for parameter in held]
            self._result.releases.append(Release(self._step(), tuple(own), options(optimizer)))
            if (release := self._next()) is not None:
                _set(held, release.gradients)

        def after(*_: object) -> None:
            release, held = self._given(self._step(), self._calls[self._step()] - 1), _held(optimizer)
            if release is None:
                return
            if all(map(_same, (parameter.grad for parameter in held), release.gradients)):
                _set(held, own)
            else:
                self._result.releases[-1] = replace(self._result.releases[-1], kept=False)

        self._seen.append((optimizer, before, optimizer.register_step_pre_hook(before)))
        optimizer.register_step_post_hook(after)

    def come_last(self) -> None:
        """Behind all that others have each optimizer call before its step; to be called when a step begins."""
        for number, (optimizer, before, handle) in enumerate(self._seen):
            handle.remove()
            self._seen[number] = (optimizer, before, optimizer.register_step_pre_hook(before))

    def _next(self) -> Release | None:
        step = self._step()
        self._calls[step] += 1
        return self._given(step, self._calls[step] - 1)

    def _given(self, step: int, call: int) -> Release | None:
        """What the other training's optimizers were given at this call; None where there was none."""
        return self._forced.get((step, call))


def options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Learning rate and the like, by name and group."""
    return {
        f"{key} of group {number}": group[key]
        for number, group in enumerate(optimizer.param_groups)
        for key in _OPTIONS
        if key in group
    }


def _places(releases: Sequence[Release]) -> list[int]:
    """The number of each among the calls of its step."""
    calls: Counter[int] = Counter()
    found = []
    for release in releases:
        found.append(calls[release.step])
        calls[release.step] += 1
    return found


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local(gradient: Tensor) -> Tensor:
    found: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
    return found.detach()


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else _local(gradient).to("cpu", copy=True)


def _same(gradient: Tensor | None, wanted: Tensor | None) -> bool:
    if gradient is None or wanted is None:
        return gradient is wanted
    own = _local(gradient)
    return own.shape == wanted.shape and torch.equal(own.cpu(), wanted)


@torch.no_grad()
def _set(held: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Give parameters these gradients: in place where they have some, for others may hold the same tensors."""
    for parameter, gradient in zip(held, gradients, strict=True):
        if gradient is None:
            parameter.grad = None
        else:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _local(parameter.grad).copy_(gradient)
