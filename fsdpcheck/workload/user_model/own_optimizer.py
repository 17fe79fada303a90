"""A user's own optimizer: what ``optimizer(model)`` gives, as one ``Optimizer``, on ranks and on one device.

It may give an optimizer, several in a list or tuple, or a container that steps those in its attribute ``optimizers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdpcheck.case import UserModelSpec
from fsdpcheck.compat import torch_private
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.workload.user_model import loading as user_model

_PREFIX = "model."
"""How the canonical names of a user's parameters begin: the harness's layer stands beside the model."""


def made(ref: str, model: nn.Module) -> torch.optim.Optimizer:
    """What the user's function makes of ``model``, as one optimizer. Raises UsageError for what is none.

    Fused kernels are switched off, whose bits on a CPU depend on where a buffer lies.
    """
    given = user_model.optimizer(ref)(model)
    found = list(parts(given))
    if not found:
        got = "nothing" if given is None else f"{type(given).__name__}, which has no optimizer"
        wanted = "a torch.optim.Optimizer, a list of some, or a container with .optimizers"
        then = "return the optimizer, as in: return torch.optim.AdamW(model.parameters())"
        raise UsageError(explain(f"optimizer function {ref!r} gives no optimizer", got=got, wanted=wanted, then=then))
    for group in (group for one in found for group in one.param_groups if group.get("fused")):
        group["fused"] = False
    return given if isinstance(given, torch.optim.Optimizer) else Joined(given, found)


def parts(given: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that ``given`` is, or holds: those that have states of their own."""
    if isinstance(given, (list, tuple)):
        held: Sequence[Any] = given
    else:
        held = getattr(given, "optimizers", ())
    if isinstance(held, (list, tuple)) and held:
        for one in held:
            yield from parts(one)
    elif isinstance(given, torch.optim.Optimizer):
        yield given


class Joined(torch.optim.Optimizer):
    """Several optimizers as one, ``given`` as the user's function gave them."""

    def __init__(self, given: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.given, self.optimizers = given, list(optimizers)
        held = [value for one in optimizers for group in one.param_groups for value in group["params"]]
        super().__init__(list({id(value): value for value in held}.values()), {})

    @torch_private.never_wrapped
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._called:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self._called:
            one.zero_grad()

    def register_step_post_hook(self, hook: Any) -> Any:
        """After each of them: a user's own step calls them one by one."""
        return [one.register_step_post_hook(hook) for one in self.optimizers]

    @property
    def _called(self) -> Sequence[Any]:
        return self.given if isinstance(self.given, (list, tuple)) else [self.given]


def on(own: UserModelSpec, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """What it makes of a copy of the user's unsharded model whose parameters are ``parameters``, by canonical name.

    One that is not among them keeps the copy's own value, and has no gradient.
    """
    model = user_model.model(own.build)
    known = {id(value): parameters.get(f"{_PREFIX}{name}", value) for name, value in model.named_parameters()}
    for module in model.modules():
        for name, value in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, known[id(value)].requires_grad_(value.requires_grad))
    return made(own.optimizer, model)
