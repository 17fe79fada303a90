"""Looking at a user's own optimizer: whether every element is updated by its own gradient alone, wherever it lies.

Then sharding changes no bit of an update, and what the function makes of the unsharded model is the right answer. An
optimizer that takes a norm of a gradient, or multiplies it by matrices, rounds otherwise on each number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from fsdpcheck.errors import UsageError, excerpt, explain
from fsdpcheck.process_state.seeds import fixed_seeds
from fsdpcheck.workload.user_model import casting, own_optimizer
from fsdpcheck.workload.user_model import loading as user_model

_STEPS: Final = 2
_WANTED: Final = "an update of each element by its own value and gradient: SGD, Adam, AdamW and the like"
_THEN: Final = "leave --optimizer out: gradients are judged all the same, with drawn optimizers"

_Change = Callable[[Tensor], Tensor]
"""Parameters or gradients in other places, or with other values in some."""


def require_elementwise(ref: str, build: str) -> None:
    """Raises UsageError for an optimizer that gives no exact update: no optimizer, one of other tensors, a random one,
    or one whose update of an element depends on others."""
    right = _updated(ref, build, _as_it_is, seed=0)
    drawn = _drawn(build, _as_it_is)
    if all(torch.equal(value, drawn[name]) for name, value in right.items()):
        got, then = f"the parameters of before {_STEPS} steps", "give it a rate above zero from its first step on"
        _refuse(f"optimizer {ref!r} updates nothing", got, "other ones", then)
    for what, change, seed, compared in (
        ("gives another update each time", _as_it_is, 1, _everywhere),
        ("mixes elements: other gradients elsewhere change an update", _half_changed, 0, _not_changed),
        ("gives other updates in other places of a tensor", _rolled, 0, _everywhere),
    ):
        found = _updated(ref, build, change, seed)
        for name, value in right.items():
            wanted = _rolled(value) if change is _rolled else value
            mask = compared(value) & (found[name] != wanted) & ~(found[name].isnan() & wanted.isnan())
            if bool(mask.any()):
                index = tuple(int(place) for place in mask.nonzero()[0])
                got = f"{float(found[name][index])} against {float(wanted[index])} at {name}{list(index)}"
                _refuse(f"optimizer {ref!r} {what}", got, _WANTED, _THEN)


def _updated(ref: str, build: str, change: _Change, seed: int) -> dict[str, Tensor]:
    """Parameters after some steps on drawn gradients, by name, in float64."""
    model, drawn = casting.cast(user_model.model(build), torch.float64), _drawn(build, change)
    named, trained = dict(model.named_parameters()), _trained(model)
    with torch.no_grad():
        for name, value in named.items():
            value.copy_(drawn[name])
    optimizer = _made(ref, model, {id(value) for value in named.values()})
    now = dict(model.named_parameters())
    as_before = now.keys() == drawn.keys() and all(torch.equal(value, drawn[name]) for name, value in now.items())
    if not as_before or _trained(model) != trained:
        then = "change the model where it is built, or where it is made parallel"
        _refuse(f"optimizer function {ref!r} changes the model", "other parameters behind it", "the same ones", then)
    gradients = torch.Generator().manual_seed(1)
    with fixed_seeds(seed):
        for _ in range(_STEPS):
            for value in named.values():
                value.grad = change(_random(value, gradients)) if value.requires_grad else None
            _called(f"step() of optimizer {ref!r}", optimizer.step)
    return {name: value.detach() for name, value in named.items()}


def _drawn(build: str, change: _Change) -> dict[str, Tensor]:
    """What parameters are before the first step, by name."""
    values = torch.Generator().manual_seed(0)
    return {name: change(_random(value, values)) for name, value in user_model.values(build).items()}


def _random(like: Tensor, values: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=values, dtype=torch.float64)


def _trained(model: nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters() if value.requires_grad]


def _made(ref: str, model: nn.Module, own: set[int]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = _called(f"optimizer {ref!r}", lambda: own_optimizer.made(ref, model))
    if any(id(value) not in own for value in _held(optimizer)):
        got, then = "a tensor that is no parameter of the model it is given", "take them from model.named_parameters()"
        _refuse(f"optimizer {ref!r} updates other tensors", got, "parameters of the given model", then)
    return optimizer


def _held(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for one in own_optimizer.parts(optimizer):
        yield from (value for group in one.param_groups for value in group["params"])


def _as_it_is(values: Tensor) -> Tensor:
    return values


def _rolled(values: Tensor) -> Tensor:
    return values.flatten().roll(1).view(values.shape)


def _half_changed(values: Tensor) -> Tensor:
    return torch.where(_not_changed(values), values, 3 * values + 1)


def _everywhere(like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=torch.bool)


def _not_changed(like: Tensor) -> Tensor:
    """Every other element."""
    return (torch.arange(like.numel()) % 2 == 0).view(like.shape)


def _called(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        then = "run it by itself on the model of --model, on one device"
        _refuse(f"{what} raised", f"{excerpt.kind(error)}: {excerpt.said(error)}", "an update", then)


def _refuse(what: str, got: str, wanted: str, then: str) -> NoReturn:
    raise UsageError(explain(what, got=got, wanted=wanted, then=then))
