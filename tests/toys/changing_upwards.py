"""Replaces SGD.step when it is imported by one that goes up instead of down."""

from __future__ import annotations

from typing import Any

import torch

from tests.toys.averaging import Averaging


@torch.no_grad()
def _up(self: Any, closure: object = None) -> None:
    for group in self.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=group["lr"])


torch.optim.SGD.step = _up  # type: ignore[method-assign,assignment]

adapter = Averaging("upwards")
