"""In which arithmetic a run computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Arithmetic:
    """How the operations of a run round.

    ``precision``: the script's own, or float64 in place of every floating type below it. ``noise``: None, or the seed
    of Monte Carlo arithmetic: what each rounding operation is given and gives is multiplied by 1 + u, u uniform in
    [-eps, eps] of its type. ``batch_statistics``: False for BatchNorm by its running averages.
    """

    precision: Literal["own", "float64"] = "own"
    noise: int | None = None
    batch_statistics: bool = True
