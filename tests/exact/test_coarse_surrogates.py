"""Coarse surrogates: normalisations that pass gradients on and take no bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdpcheck.exact import surrogates
from fsdpcheck.exact.certifier import FLOAT64, Certifier
from fsdpcheck.exact.surrogates.grids import COARSE


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)], ids=lambda m: type(m).__name__)
def test_coarse_normalisations_pass_gradients_on_and_take_no_bits(layer: nn.Module) -> None:
    layer = layer.double()
    x = torch.tensor([[3.0, -1.0, 2.0, 5.0], [0.0, 1.0, -4.0, 2.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([2.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    cotangent = torch.tensor([[1.0, 2.0, -3.0, 1.0], [0.0, 5.0, 1.0, -1.0]], dtype=torch.float64)
    layer.weight.data = weight
    with surrogates.installed(COARSE), Certifier(FLOAT64, "test") as certifier:
        output = layer(x)
        certifier.stage = "backward"
        (found,) = torch.autograd.grad(output, x, cotangent)
        bound = certifier.bound(found)
    assert torch.equal(found, cotangent * weight)
    assert torch.equal(bound.terms.reshape(found.shape), found.abs())
    assert bound.exponent <= 0
    with surrogates.installed():
        (fine,) = torch.autograd.grad(layer(x), x, cotangent)
    assert not torch.equal(fine, found)


def test_coarse_and_fine_surrogates_are_not_in_place_at_once() -> None:
    with surrogates.installed(COARSE), pytest.raises(RuntimeError, match="two kinds"), surrogates.installed():
        pass
    with surrogates.installed():
        assert surrogates.active()
