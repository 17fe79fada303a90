"""What several rules share: squares of small per-sample gradients, and backprops scaled by samples' weights."""

from __future__ import annotations

from torch import Tensor


def squares(gradients: dict[str, Tensor], backprops: Tensor) -> Tensor:
    """[B]: squared norm over all of ``gradients`` {attribute: [B, *shape]}; zeros like ``backprops`` if there are none.

    Every gradient is complete: nothing is squared before its sum over positions has ended.
    """
    squared_B = backprops.new_zeros(len(backprops))
    for gradient in gradients.values():
        squared_B = squared_B + gradient.unsqueeze(-1).flatten(1).square().sum(1)
    return squared_B


def scaled(backprops: Tensor, weights_B: Tensor) -> Tensor:
    """``backprops`` [B, ...] times the weight of their sample."""
    return backprops * weights_B.to(backprops.dtype).reshape(-1, *[1] * (backprops.dim() - 1))
