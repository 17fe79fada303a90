"""Optimizer state by canonical parameter name, so that it does not depend on how, or over how many ranks, a model is
sharded.

Understood: state tensors that are elementwise like their parameter (momentum, moments), which are spans like it, and
plain data that is equal on all ranks (step counters). Hyperparameters of a group are kept for each parameter in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..sharding.protocol import Sharded
from ..sharding.spans import Span
from . import plain_data
from .planners import StateError

Plain = dict[str, Any]


@dataclass
class Described:
    """The replicated part of an optimizer's state, by canonical name."""

    elementwise: dict[str, list[str]] = field(default_factory=dict)
    """Which state tensors there are of each trainable parameter."""
    scalars: dict[str, Plain] = field(default_factory=dict)
    hyperparameters: dict[str, Plain] = field(default_factory=dict)

    def of(self, name: str) -> tuple[list[str], Plain]:
        """All that the file holds of one parameter's state, or StateError."""
        if name not in self.hyperparameters:
            raise StateError(
                f"the file has no optimizer state of {name}\n  got     state of {short(self.hyperparameters)}\n"
                f"  wanted  state of every trainable parameter\n"
                f"  next    freeze the same parameters as when it was saved, or load the model only"
            )
        return self.elementwise.get(name, []), self.scalars.get(name, {})


def key(name: str, state: str) -> str:
    """The name under which a state tensor lies in a file."""
    return f"optimizer.state.{name}.{state}"


def spans(model: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Span]:
    """This rank's parts of all elementwise state, live; of replicas the first writes."""
    found, writes = {}, model.replicas.rank == 0
    for shard in _shards(model, optimizer):
        for state, value in optimizer.state.get(shard, {}).items():
            if _is_elementwise(shard, state, value):
                for name, span in model.cut(shard, value.detach()).items():
                    found[key(name, state)] = replace(span, writes=writes and span.writes)
    return found


def describe(model: Sharded, optimizer: torch.optim.Optimizer) -> Described:
    """Everything else, copied. Raises TypeError for state that is neither elementwise nor plain, or no scalar."""
    found = Described()
    _shards(model, optimizer)
    for group in optimizer.param_groups:
        options = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        plain_data.check(options, "a parameter group of the optimizer")
        for shard in group["params"]:
            state = optimizer.state.get(shard, {})
            alike = [name for name, value in state.items() if _is_elementwise(shard, name, value)]
            scalars = {name: _scalar(name, value) for name, value in state.items() if name not in alike}
            for name in names(model, shard):
                found.hyperparameters[name] = dict(options)
                found.scalars[name] = scalars
                found.elementwise[name] = alike
    return found


def names(model: Sharded, shard: nn.Parameter) -> list[str]:
    """Canonical names of the parameters in one shard."""
    return list(model.cut(shard, shard.detach()))


@dataclass
class Prepared:
    """State to be given to an optimizer: allocated, to be filled through ``spans``, then to be taken over."""

    states: list[tuple[nn.Parameter, Plain]]
    groups: list[tuple[Plain, Plain]]
    spans: dict[str, Span]

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state and hyperparameters."""
        for shard, state in self.states:
            optimizer.state.pop(shard, None)
            if state:
                optimizer.state[shard] = state
        for group, options in self.groups:
            group.update(options)


def prepare(
    model: Sharded, optimizer: torch.optim.Optimizer, saved: Described, dtypes: Mapping[str, torch.dtype]
) -> Prepared:
    """Room for saved state, zero where a shard is padding. ``dtypes``: of the file's tensors, by ``key``.

    Raises StateError if parameters that share a shard or a group were saved with different scalars or hyperparameters.
    """
    prepared = Prepared([], [], {})
    _check_none_left(saved, [name for shard in _shards(model, optimizer) for name in names(model, shard)])
    for shard in _shards(model, optimizer):
        owners = names(model, shard)
        elementwise, scalars = _alike("state", {name: saved.of(name) for name in owners})
        state: Plain = {}
        for entry in elementwise:
            value = state[entry] = torch.zeros_like(shard.detach(), dtype=dtypes[key(owners[0], entry)])
            prepared.spans.update({key(name, entry): span for name, span in model.cut(shard, value).items()})
        options = saved.hyperparameters[owners[0]]
        state.update({name: _own(value, shard, options) for name, value in scalars.items()})
        prepared.states.append((shard, state))
    for group in optimizer.param_groups:
        owners = [name for shard in group["params"] for name in names(model, shard)]
        options = _alike("hyperparameters", {name: saved.hyperparameters[name] for name in owners})
        prepared.groups.append((group, dict(options)))
    return prepared


def short(found: Any) -> str:
    """The first few of many names."""
    listed = list(found)
    return ", ".join(map(str, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "nothing"


def _shards(model: Sharded, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer updates, in its order. Raises ValueError unless these are shards of the model."""
    own = {id(shard) for shard in model.shards()}
    found = [shard for group in optimizer.param_groups for shard in group["params"]]
    if strangers := [list(shard.shape) for shard in found if id(shard) not in own]:
        raise ValueError(
            f"the optimizer updates parameters that are no shards of the model\n  got     shapes {short(strangers)}\n"
            f"  wanted  some of model.shards()\n  next    make the optimizer from model.shards(), after sharding"
        )
    return found


def _check_none_left(saved: Described, updated: Sequence[str]) -> None:
    if left := sorted(saved.hyperparameters.keys() - set(updated)):
        raise StateError(
            f"the file has optimizer state of parameters that the optimizer does not update\n  got     {short(left)}\n"
            f"  wanted  {short(updated)}\n"
            f"  next    freeze the same parameters as when it was saved, or load the model only"
        )


def _alike(what: str, of: Mapping[str, Any]) -> Any:
    """The one value that all parameters of a shard or a group were saved with."""
    first = next(iter(of))
    for name, value in of.items():
        if different := plain_data.difference(of[first], value):
            raise StateError(
                f"parameters that are updated together were saved with different {what}\n"
                f"  got     {first} and {name} differ in {different}\n  wanted  equal {what} of {short(of)}\n"
                f"  next    load with per-parameter sharding and the parameter groups that saved it"
            )
    return of[first]


def _own(value: Any, shard: nn.Parameter, options: Plain) -> Any:
    """A scalar for one shard; fused and capturable optimizers want their step counters on the parameter's device."""
    if not isinstance(value, Tensor):
        return value
    return value.to(shard.device if options.get("fused") or options.get("capturable") else "cpu", copy=True)


def _is_elementwise(shard: nn.Parameter, name: str, value: object) -> bool:
    """Whether a state is like its parameter; of one without dims the step counter has the shape too."""
    return isinstance(value, Tensor) and value.shape == shard.shape and name != "step"


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(
            f"only elementwise optimizer state can be saved\n  got     {name} of shape {list(value.shape)}\n"
            f"  wanted  the parameter's own shape, or one number\n  next    save at the same world size with torch.save"
        )
    plain_data.check(value, f"optimizer state {name!r}")
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
