"""Releases: what the optimizers of a rank are given, by call, so that another training can be given the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Release:
    """One call of one optimizer on one rank. ``step``: in which step of the training, from 0.

    ``gradients``: this rank's part of the gradient of each parameter, in the optimizer's order, as the implementation
    has set it; None where there is none. ``options``: learning rate and the like, by name and group. ``kept``: whether
    the optimizer went by the gradients that it was given; False where they were set anew within the call.
    """

    step: int
    gradients: tuple[Tensor | None, ...]
    options: Mapping[str, object]
    kept: bool = True
