"""StatelessOptimizer: parameters move by a function of their gradients alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.compat import torch_private


class StatelessOptimizer(torch.optim.Optimizer):
    """Each parameter with a gradient moves by -lr times ``update`` of it; no state is kept."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0})

    @torch_private.never_wrapped
    @torch.optim.Optimizer.profile_hook_step  # torch would put it here when the first is made: our class would change
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.update(parameter.grad), alpha=-group["lr"])

    def update(self, gradient: Tensor) -> Tensor:
        """What a parameter of this gradient moves by, of the gradient's shape and placements."""
        raise NotImplementedError
