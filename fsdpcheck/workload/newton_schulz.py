"""An optimizer whose update of an element depends on the whole matrix, as Muon's does, in arithmetic that is exact.

Source: K. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", which iterates a quintic; this
is one step of the cubic one, X' = 3/2 X - 1/2 X X^T X, towards a matrix whose singular values are 1.
"""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor

from fsdpcheck.compat.torch_private import is_dtensor
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.grid import bits, grid_exponent
from fsdpcheck.workload.stateless_optimizer import StatelessOptimizer


class NewtonSchulz(StatelessOptimizer):
    """Matrices move by a Newton-Schulz step of their gradient, all other parameters by the gradient itself (SGD)."""

    def update(self, gradient: Tensor) -> Tensor:
        return _update(gradient)


def _update(gradient: Tensor) -> Tensor:
    if gradient.dim() != 2:
        return gradient
    scaled = gradient * 2.0 ** -_exponent(gradient)
    found: Any = 1.5 * scaled - 0.5 * (scaled @ scaled.mT @ scaled)
    if is_dtensor(gradient):  # a product may lie on the ranks otherwise than its factors
        placed: Any = gradient
        found = found.redistribute(placements=placed.placements)
    return cast(Tensor, found)


def _exponent(gradient: Tensor) -> int:
    """The least e such that absolute values add up to less than 2**e; 0 for zeros.

    Not that of the largest: ``max`` of a DTensor raises on a rank that has nothing of it (torch 2.13).
    """
    total: Any = gradient.abs().sum()
    return math.frexp(float(total.full_tensor() if is_dtensor(total) else total))[1]


def require_exact(gradient: Tensor, had: int, where: str) -> None:
    """Raise NotExact where a sum of the step of ``gradient`` might take more than ``had`` bits, in some order."""
    if gradient.dim() != 2:
        return
    scaled = gradient.double() * 2.0 ** -_exponent(gradient)
    exponent, size = grid_exponent(scaled), scaled.abs()
    squares, cubes = size @ size.mT, size @ size.mT @ size
    whole = 1.5 * size + 0.5 * cubes  # of multiples of 2**(3 e - 1), for nothing of it is as large as 1
    sums = ("total", size.sum(), exponent), ("squares", squares, 2 * exponent), ("update", whole, 3 * exponent - 1)
    for stage, bound, unit in sums:
        needed = bits(float(bound.max()) if bound.numel() else 0.0, unit)
        if needed > had:
            raise NotExact(f"{where}, {stage} of a Newton-Schulz step: needs {needed} bits; had {had}")
