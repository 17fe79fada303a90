"""Samples whose gradient norm is NaN or infinite: refused on all ranks, or left out.

Such a sample has no clip factor, and 0 * NaN is NaN: multiplying it by zero does not remove it. ``Options.nonfinite``

* "raise" (default): after the last micro-batch one small all-gather, the same on every rank whatever it holds, tells
  everybody who has such samples; all ranks raise, name them, and drop what they have computed.
* "drop": the rows are cut out of activations and backprops before they are contracted, so that every other sample
  counts as if the batch had come without them. Needs the mode "bookkeeping": a second backward meets the same NaNs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sharding import collectives
from ..sharding.collectives import Axis, Subject

FLAGS = Subject("(non-finite samples)")
_NONE = -1


class NonFiniteNorm(ArithmeticError):
    """``samples``: global indices of samples without a finite gradient norm, the first one of each rank, by rank."""

    def __init__(self, samples: dict[int, int], total: int) -> None:
        named = ", ".join(f"sample {sample} on rank {rank}" for rank, sample in samples.items())
        super().__init__(
            f"the gradient norm of {total} samples is not finite, first on each rank: {named}. No update was made;"
            " look at these inputs, or leave such samples out with nonfinite='drop' and bookkeeping"
        )
        self.samples = samples


def found_in(norms: Tensor) -> Tensor:
    """[b] bool: samples whose norm over all parameters is NaN or infinite: those that are named, or left out."""
    return ~torch.isfinite(norms)


def refuse(bad: Sequence[int], device: torch.device, *axes: Axis) -> None:
    """Raise NonFiniteNorm on every rank of all ``axes`` if any has ``bad`` samples, given by global index.

    One small all-gather an axis of several ranks, whatever anybody holds; ranks are numbered along the last axis first.
    """
    flags = torch.tensor([[len(bad), bad[0] if bad else _NONE]], dtype=torch.int64, device=device)
    for axis in axes:
        everyone = flags.new_empty(axis.size * flags.numel())
        collectives.all_gather(FLAGS, everyone, flags.flatten(), axis)
        flags = everyone.view(-1, 2)
    counts, firsts = flags.unbind(1)
    if bool(counts.any()):
        samples = {rank: int(firsts[rank]) for rank in counts.nonzero().flatten().tolist()}
        raise NonFiniteNorm(samples, int(counts.sum()))
