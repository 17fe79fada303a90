"""Coarser surrogates: normalisations that pass gradients on and take no bits, and all of them on whole numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.exact import surrogates
from fsdpcheck.exact.certifier import FLOAT64, Certifier
from fsdpcheck.exact.grid import grid_exponent
from fsdpcheck.exact.surrogates import grids
from fsdpcheck.exact.surrogates.grids import COARSE, FINE, WHOLE
from tests.common.tables import each
from tests.exact.test_surrogates import DIFFERENTIABLE, ROUTES, X, integers, pulled


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


def test_the_fine_ones_are_left_behind() -> None:
    with surrogates.installed(WHOLE):
        assert grids.now() == WHOLE
    assert grids.now() == FINE


@each("route", ROUTES)
def test_whole_surrogates_give_whole_numbers_and_halves_of_a_sigmoid(route: str) -> None:
    function, _ = ROUTES[route]
    with surrogates.installed(WHOLE):
        found = function(X)
    steps = found * (2 if "sigmoid" in route or "glu" in route else 1)  # a GLU multiplies by a sigmoid
    assert torch.equal(steps, steps.round())
    assert len(found.unique()) > 1


@each("route", DIFFERENTIABLE)
def test_their_backward_is_linear_alive_and_within_what_is_certified(route: str) -> None:
    function, _ = ROUTES[route]
    source = X.clone().requires_grad_()
    one, two = (integers(*function(X).shape, seed=seed) for seed in (3, 4))
    with surrogates.installed(WHOLE), Certifier(FLOAT64, "test") as certifier:
        output = function(source)
        certifier.stage = "backward"
        (found,) = torch.autograd.grad(output, source, one)
        bound = certifier.bound(found)
    assert bool(found.any())
    assert bool((found.abs() <= bound.terms.reshape(found.shape)).all())
    assert grid_exponent(found) >= bound.exponent
    with surrogates.installed(WHOLE):
        together: Tensor = pulled(function, X, one + 8 * two)
        assert torch.equal(together, pulled(function, X, one) + 8 * pulled(function, X, two))


def test_attention_hands_on_gradients_to_queries_where_several_keys_are_looked_at() -> None:
    """A softmax of one 1 alone hands on none: so what is above a quarter is 1."""
    query, key, value = (integers(2, 3, 4, seed=seed, bound=1).requires_grad_() for seed in (0, 1, 2))
    with surrogates.installed(WHOLE):
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        gradients = torch.autograd.grad(output, [query, key, value], integers(*output.shape, seed=3))
    assert all(bool(gradient.any()) for gradient in gradients)
