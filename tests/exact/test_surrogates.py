"""Surrogates: every route reaches them, they are exact and linear in the cotangent, and torch is itself again after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.surrogates.grid_rounding import power_of_two, to_grid
from fsdpcheck.exact.surrogates.grids import FINE
from tests.common.tables import each


def integers(*shape: int, seed: int = 0, bound: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=draw).double()


X = integers(5, 3, 4)
WEIGHT, BIAS = integers(4, seed=1) * 2 + 1, integers(4, seed=2)
MASK = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]]).bool()
ROUTES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "F.gelu": (F.gelu, FINE.activation.bits),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), FINE.activation.bits),
    "F.silu": (F.silu, FINE.activation.bits),
    "F.silu in place": (lambda x: F.silu(x.clone(), inplace=True), FINE.activation.bits),
    "F.elu": (F.elu, FINE.activation.bits),
    "F.elu in place": (lambda x: F.elu(x.clone(), inplace=True), FINE.activation.bits),
    "F.selu": (F.selu, FINE.activation.bits),
    "F.celu": (lambda x: F.celu(x, 2.0), FINE.activation.bits),
    "F.softplus": (lambda x: F.softplus(x, 0.5, 1.5), FINE.activation.bits),
    "F.mish": (F.mish, FINE.activation.bits),
    "F.hardswish": (F.hardswish, FINE.activation.bits),
    "F.hardsigmoid": (F.hardsigmoid, FINE.sigmoid.bits),
    "F.logsigmoid": (F.logsigmoid, FINE.log.bits),
    "F.glu": (F.glu, FINE.sigmoid.bits),
    "torch.tanh": (torch.tanh, FINE.tanh.bits),
    "Tensor.tanh_": (lambda x: x.clone().tanh_(), FINE.tanh.bits),
    "tanh out": (lambda x: torch.tanh(x, out=torch.empty_like(x)), FINE.tanh.bits),
    "nn.Tanh": (nn.Tanh(), FINE.tanh.bits),
    "torch.sigmoid": (torch.sigmoid, FINE.tanh.bits),
    "Tensor.sigmoid_": (lambda x: x.clone().sigmoid_(), FINE.tanh.bits),
    "torch.softmax": (lambda x: torch.softmax(x, -1), FINE.softmax.bits),
    "Tensor.softmax": (lambda x: x.softmax(1), FINE.softmax.bits),
    "F.log_softmax": (lambda x: F.log_softmax(x, -1), FINE.log.bits),
    "F.layer_norm": (lambda x: F.layer_norm(x, (4,)), FINE.normal.bits),
    "torch.layer_norm": (lambda x: torch.layer_norm(x, (4,), WEIGHT, BIAS), FINE.normal.bits),
    "native_layer_norm": (lambda x: torch.native_layer_norm(x, (3, 4), None, None, 1e-5)[0], FINE.normal.bits),
    "nn.LayerNorm": (nn.LayerNorm(4).double(), FINE.normal.bits),
    "nn.GroupNorm": (nn.GroupNorm(3, 3).double(), FINE.normal.bits),
    "F.rms_norm": (lambda x: F.rms_norm(x, (4,), WEIGHT), FINE.normal.bits),
    "nn.RMSNorm": (nn.RMSNorm(4).double(), FINE.normal.bits),
    "SDPA": (lambda x: F.scaled_dot_product_attention(x, x, x), FINE.softmax.bits),
    "SDPA causal": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), FINE.softmax.bits),
    "SDPA masked": (
        lambda x: F.scaled_dot_product_attention(
            x, x, x, attn_mask=torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]]).bool()
        ),
        FINE.softmax.bits,
    ),
    "cross-entropy": (
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(15) % 4, reduction="none"),
        FINE.log.bits,
    ),
}


@each("route", ROUTES)
def test_every_route_gives_values_on_the_grid_and_torch_is_itself_after(route: str) -> None:
    function, bits = ROUTES[route]
    before = function(X)
    with surrogates.installed():
        inside = function(X)
    assert torch.equal(inside * 2**bits, (inside * 2**bits).round())
    assert torch.equal(function(X), before)
    assert not torch.equal(inside, before)
    assert (
        float((inside - before).detach().abs().max()) <= 3
    )  # it is still the function: near it, where that is not saturated


DIFFERENTIABLE = sorted(set(ROUTES) - {"tanh out"})


def pulled(function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Tensor:
    source = x.clone().requires_grad_()
    found: Tensor = torch.autograd.grad(function(source), source, cotangent)[0]
    return found


@each("route", DIFFERENTIABLE)
def test_backward_is_linear_exact_and_alive(route: str) -> None:
    function, _ = ROUTES[route]
    with surrogates.installed():
        shape = function(X).shape
        one, two = integers(*shape, seed=3), integers(*shape, seed=4)
        together = pulled(function, X, 0.25 * one + 8 * two)
        assert torch.equal(together, 0.25 * pulled(function, X, one) + 8 * pulled(function, X, two))
        assert bool(together.any())


def test_an_elu_that_is_written_over_its_input_has_the_slope_of_its_result() -> None:
    x = torch.tensor([-4.0, -1.0, 0.0, 3.0], dtype=torch.float64)
    with surrogates.installed():
        found = pulled(ROUTES["F.elu in place"][0], x, torch.ones_like(x))
    assert found.tolist() == [0.0, 0.5, 1.0, 1.0]


ROW_BY_ROW = sorted(set(DIFFERENTIABLE) - {"cross-entropy"})


WEIGHTS_IN_FLOAT64 = ("torch.layer_norm", "F.rms_norm")


@each(
    ("route", "dtype"),
    [(route, torch.float64) for route in ROW_BY_ROW]
    + [(route, torch.float32) for route in ROW_BY_ROW if route not in WEIGHTS_IN_FLOAT64],
)
def test_a_sample_alone_gives_the_bits_it_gives_in_a_batch(route: str, dtype: torch.dtype) -> None:
    function, _ = ROUTES[route]
    own = function.to(dtype) if isinstance(function, nn.Module) else function
    with surrogates.installed():
        cotangent = (
            integers(*function(X).shape, seed=5) if dtype == torch.float64 else integers(*own(X.to(dtype)).shape)
        )
        whole, back = own(X.to(dtype)), pulled(own, X.to(dtype), cotangent.to(dtype))
        for row in range(len(X)):
            alone = X[row : row + 1].to(dtype)
            assert torch.equal(own(alone), whole[row : row + 1])
            assert torch.equal(pulled(own, alone, cotangent[row : row + 1].to(dtype)), back[row : row + 1])
    if isinstance(function, nn.Module):
        function.double()


@pytest.mark.parametrize("route", ["F.gelu", "torch.tanh", "F.silu", "torch.sigmoid", "nn.LayerNorm", "torch.softmax"])
def test_slopes_have_the_sign_of_the_true_ones_where_they_are_large(route: str) -> None:
    function, _ = ROUTES[route]
    cotangent = torch.zeros_like(X)
    cotangent[:, :, 0] = 1
    true = pulled(function, X / 2, cotangent)
    with surrogates.installed():
        rounded = pulled(function, X / 2, cotangent)
    large = true.abs() > 0.2
    assert bool(large.any())
    assert torch.equal(rounded[large].sign(), true[large].sign())


@pytest.mark.parametrize("route", ["F.layer_norm", "torch.softmax", "F.rms_norm"])
def test_backward_couples_the_features_of_a_row(route: str) -> None:
    function, _ = ROUTES[route]
    cotangent = torch.zeros_like(X)
    cotangent[:, :, 0] = 1
    with surrogates.installed():
        assert bool(pulled(function, X, cotangent)[:, :, 1:].any())


def test_norm_parameters_see_the_rounded_input_that_a_norm_rule_sees() -> None:
    layer = nn.LayerNorm(4).double()
    with surrogates.installed():
        cotangent = integers(*X.shape, seed=6)
        of_weight, of_bias = torch.autograd.grad(layer(X), [layer.weight, layer.bias], cotangent)
        assert torch.equal(of_weight, (F.layer_norm(X, (4,), eps=layer.eps) * cotangent).sum((0, 1)))
        assert torch.equal(of_bias, cotangent.sum((0, 1)))


def test_values_near_a_decision_are_counted_and_ties_are_none() -> None:
    before = surrogates.doubts.count
    to_grid(torch.tensor([0.25, 0.5, 0.125, 0.0, -0.375], dtype=torch.float64), 2, -1, 1)
    power_of_two(torch.tensor([0.25, 0.5, 1.0, 2.0], dtype=torch.float64), -1, 0)
    assert surrogates.doubts.count == before
    to_grid(torch.tensor([0.55 / 4 + 1e-9], dtype=torch.float64), 2, -1, 1)
    power_of_two(torch.tensor([0.625], dtype=torch.float64), -1, 0)
    assert surrogates.doubts.count == before + 2


def test_they_are_reentrant_and_leave_after_an_exception() -> None:
    before = torch.tanh(X)
    with suppress(RuntimeError), surrogates.installed():
        with surrogates.installed():
            assert surrogates.active()
        assert surrogates.active()
        assert not torch.equal(torch.tanh(X), before)
        raise RuntimeError("on purpose")
    assert not surrogates.active()
    assert torch.equal(torch.tanh(X), before)


def test_a_poisoned_input_is_not_rounded_away() -> None:
    poisoned = X.clone()
    poisoned[0, 0, 0] = torch.nan
    with surrogates.installed():
        for route in ("F.gelu", "torch.softmax", "F.layer_norm", "F.rms_norm"):
            assert bool(ROUTES[route][0](poisoned)[0, 0].isnan().any()), route


def test_attention_that_has_no_surrogate_is_refused() -> None:
    with surrogates.installed(), pytest.raises(NotExact, match="tier of real numbers"):
        F.scaled_dot_product_attention(X, X, X, dropout_p=0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_are_those_of_heads_that_are_repeated(causal: bool) -> None:
    query, key, value = integers(2, 4, 3, 4), integers(2, 2, 3, 4, seed=1), integers(2, 2, 3, 4, seed=2)
    with surrogates.installed():
        sources = [part.clone().requires_grad_() for part in (query, key, value)]
        grouped = F.scaled_dot_product_attention(*sources, is_causal=causal, enable_gqa=True)
        again = [part.clone().requires_grad_() for part in (query, key, value)]
        repeated = [part.repeat_interleave(2, 1) for part in again[1:]]
        plain = F.scaled_dot_product_attention(again[0], *repeated, is_causal=causal)
        assert torch.equal(grouped, plain)
        cotangent = integers(*plain.shape, seed=3)
        of_grouped, of_plain = (torch.autograd.grad(*of, cotangent) for of in ((grouped, sources), (plain, again)))
        assert all(torch.equal(one, two) and bool(one.any()) for one, two in zip(of_grouped, of_plain, strict=True))


@each("route", ROW_BY_ROW)
def test_no_rows_are_no_trouble(route: str) -> None:
    with surrogates.installed():
        empty = X[:0].clone().requires_grad_()
        output = ROUTES[route][0](empty)
        assert len(output) == 0
        output.sum().backward()


def test_attention_that_is_evaluated_has_them_too_and_its_own_kernel_back_afterwards() -> None:
    attention = nn.MultiheadAttention(2, 2, batch_first=True).double()
    x = torch.tensor([[[1.0, -1.0], [2.0, 0.0]]], dtype=torch.float64)
    with surrogates.installed():
        trained = attention(x, x, x, need_weights=False)[0].detach()
        with torch.no_grad():
            evaluated = attention.eval()(x, x, x, need_weights=False)[0]
    with torch.no_grad():
        true = attention(x, x, x, need_weights=False)[0]
    assert torch.equal(evaluated, trained)
    assert not torch.equal(evaluated, true), "the softmax of this is on no grid"
    assert torch.backends.mha.get_fastpath_enabled()
