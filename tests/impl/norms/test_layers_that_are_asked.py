"""Layers nobody has a rule for are asked whether they mix samples: ones that view their input, or have wide rows."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

fallback: Any = importlib.import_module("fsdpcheck.impl.norms.fallback")


class Viewing(nn.Module):
    def __init__(self, across: bool) -> None:
        super().__init__()
        self.weight, self.across = nn.Parameter(torch.ones(3, 2)), across

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + x.flip(0) if self.across else x
        return torch.mm(mixed.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], 2)


@pytest.mark.parametrize("across", [False, True])
def test_a_layer_that_views_its_input_is_asked(across: bool) -> None:
    assert fallback.mixes_samples(Viewing(across), torch.zeros(4, 5, 3)) is across


class Centred(nn.Module):
    """Each row's sum less the mean of those of all rows, or its own."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        self.weight, self.across = nn.Parameter(torch.ones(1).half()), across

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(1, keepdim=True)
        return (total - total.mean(0 if self.across else 1, keepdim=True)) * self.weight


@pytest.mark.parametrize("across", [False, True])
def test_a_sum_of_a_wide_row_in_float16_is_asked(across: bool) -> None:
    """A sum of 1, 2, 3, ... would be infinite, and infinite less infinite NaN, whether samples mix or not."""
    assert fallback.mixes_samples(Centred(across), torch.zeros(4, 500).half()) is across
