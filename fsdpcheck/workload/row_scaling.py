"""An optimizer whose update of an element depends on its row of the matrix, in arithmetic that is exact.

So do normalised and factored updates: each row is divided by a norm of its own. Here that is the least power of two
above the sum of absolute values, so that nothing is rounded. Sources: N. Shazeer and M. Stern 2018, "Adafactor:
Adaptive learning rates with sublinear memory cost", whose second moments are means over rows and columns; A. Glentis et
al. 2025, "A minimalist optimizer design for LLM pretraining", whose updates are divided by norms of columns.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fsdpcheck.compat.torch_private import is_dtensor
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.grid import bits, grid_exponent
from fsdpcheck.workload.stateless_optimizer import StatelessOptimizer


class RowScaled(StatelessOptimizer):
    """Matrices move by their gradient with each row scaled below 1, all other parameters by the gradient (SGD)."""

    def update(self, gradient: Tensor) -> Tensor:
        return _update(gradient)


def _update(gradient: Tensor) -> Tensor:
    if gradient.dim() != 2:
        return gradient
    total: Any = gradient.abs().sum(1)
    whole: Tensor = total.full_tensor() if is_dtensor(total) else total
    powers = torch.ldexp(torch.ones_like(whole), -torch.frexp(whole).exponent)[:, None]
    if is_dtensor(gradient):
        placed: Any = gradient
        mesh = placed.device_mesh
        scale: Any = DTensor.from_local(powers, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return cast(Tensor, (gradient * scale).redistribute(placements=placed.placements))
    return gradient * powers


def require_exact(gradient: Tensor, had: int, where: str) -> None:
    """Raise NotExact where the sum of a row of ``gradient`` might take more than ``had`` bits, in some order."""
    if gradient.dim() != 2:
        return
    sums = gradient.double().abs().sum(1)
    needed = bits(float(sums.max()) if sums.numel() else 0.0, grid_exponent(gradient))
    if needed > had:
        raise NotExact(f"{where}, the sum of a row of a gradient: needs {needed} bits; had {had}")
