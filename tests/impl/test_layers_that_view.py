"""A layer nobody has a rule for that views its input, as the Conv1D of transformers does, can be asked too."""

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
