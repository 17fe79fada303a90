"""BatchNorm by its running averages: statistics of each rank's own rows are not those of the rows of all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsdpcheck.comparison.precision import notes


def by_averages(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of ``torch.batch_norm``: (input, weight, bias, mean, variance, training, ...).

    In an arithmetic without statistics of batches it computes as in evaluation, and leaves its averages as they are.
    """

    @functools.wraps(real)
    def normalized(
        input: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *options: Any
    ) -> Tensor:
        if training and notes.is_without_batch_statistics():
            if mean is None:  # it keeps no averages: as they would be at first
                mean, variance = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
            training = False
        return real(input, weight, bias, mean, variance, training, *options)

    return normalized
