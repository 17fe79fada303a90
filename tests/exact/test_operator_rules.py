"""Each operator of a table: what is certified of its result and of its gradient bounds them, on their grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.certifier import FLOAT64, Certifier
from fsdpcheck.exact.grid import grid_exponent
from tests.common.tables import each
from tests.exact.test_surrogates import X, integers, pulled

PLACES = torch.tensor([2, 0, 3, 1]).expand(5, 3, 4)
SLOPES = torch.tensor([0.25, -3.0, 1.5], dtype=torch.float64)
THIRDS = integers(3, seed=7) / 3


def _written(x: Tensor) -> Tensor:
    copy = x * 1
    copy[:, 0] = 0
    return copy


def _of_integers(kind: type[nn.RNNBase]) -> nn.RNNBase:
    layer = kind(4, 2, batch_first=True).double()
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = integers(*parameter.shape, seed=number, bound=1)
    return layer


RECURRENT = {kind: _of_integers(kind) for kind in (nn.GRU, nn.LSTM, nn.RNN)}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(1, -1),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2, -1)[1],
    "transpose_": lambda x: (x * 1).transpose_(0, 1),
    "squeeze_": lambda x: (x * 1).unsqueeze_(0).squeeze_(0),
    "clamp_": lambda x: (x * 1).clamp_(-2, 2),
    "clamp_max": lambda x: x.clamp_max(1),
    "hardtanh_": lambda x: F.hardtanh(x * 1, inplace=True),
    "hardshrink": lambda x: F.hardshrink(x, 1.5),
    "fill_": _written,
    "sort": lambda x: torch.sort(x, stable=True).values,
    "max of a row": lambda x: x.max(-1).values,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(5, 4, 1, 3), 2),
    "im2col": lambda x: F.unfold(x.unsqueeze(1), 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "nearest of two axes": lambda x: F.interpolate(x.unsqueeze(1), scale_factor=2.0),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([2, 0]), x[:, 1:]),
    "scatter": lambda x: torch.zeros_like(x).scatter(-1, PLACES, x),
    "reflection of one axis": lambda x: F.pad(x, (2, 1), mode="reflect"),
    "reflection of two axes": lambda x: F.pad(x, (2, 1, 1, 0), mode="reflect"),
    "reflection of three axes": lambda x: F.pad(x.reshape(5, 1, 3, 2, 2), (1, 0, 0, 1, 2, 1), mode="reflect"),
    "replication of one axis": lambda x: F.pad(x, (2, 1), mode="replicate"),
    "replication of two axes": lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate"),
    "replication of three axes": lambda x: F.pad(x.reshape(5, 1, 3, 2, 2), (1, 0, 3, 1, 2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1), mode="circular"),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "max_pool2d, overlapping": lambda x: F.max_pool2d(x.unsqueeze(1), 2, 1),
}
"""Values of the operand, and zeros."""
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x.unsqueeze(1), 2, 1),
    "avg_pool2d, padded": lambda x: F.avg_pool2d(x.unsqueeze(1), 2, 1, 1),
    "avg_pool2d, by another number": lambda x: F.avg_pool2d(x.unsqueeze(1), 3, divisor_override=8),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "PReLU": lambda x: F.prelu(x, SLOPES),
    "GRU": lambda x: RECURRENT[nn.GRU](x)[0],
    "LSTM": lambda x: RECURRENT[nn.LSTM](x)[0],
    "RNN": lambda x: RECURRENT[nn.RNN](x)[0],
}


@each("name", {**MOVES, **SUMS})
def test_what_is_certified_bounds_results_and_gradients(name: str) -> None:
    function = {**MOVES, **SUMS}[name]
    with surrogates.installed():
        source = X.clone().requires_grad_()
        cotangent = integers(*function(X).shape, seed=3)
        with Certifier(FLOAT64, "test") as certifier:
            output = function(source)
            certifier.on_grid(output)
            certifier.stage = "backward"
            (found,) = torch.autograd.grad(output, source, cotangent)
            bound = certifier.bound(found)
        if name in MOVES:
            assert {*output.detach().flatten().tolist()} <= {*X.flatten().tolist(), 0.0}
        assert bool(found.any())
        assert bool((found.abs() <= bound.terms.reshape(found.shape)).all())
        assert grid_exponent(found) >= bound.exponent


@each("name", [*MOVES, *SUMS])
def test_gradients_are_linear(name: str) -> None:
    function = {**MOVES, **SUMS}[name]
    with surrogates.installed():
        one, two = (integers(*function(X).shape, seed=seed) for seed in (3, 4))
        together = pulled(function, X, one + 8 * two)
        assert torch.equal(together, pulled(function, X, one) + 8 * pulled(function, X, two))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.zeros_like(x).scatter(-1, PLACES.clamp(max=2), x), "writes to places that coincide"),
        (lambda x: x.index_copy(1, torch.tensor([0, 0]), x[:, 1:]), "writes to places that coincide"),
        (lambda x: F.avg_pool2d(x.unsqueeze(1), 3, 1), "the mean of 9 values"),
        (lambda x: F.avg_pool2d(x.unsqueeze(1), 2, 2, ceil_mode=True), "unequal numbers of values"),
        (
            lambda x: F.avg_pool2d(x.unsqueeze(1), 2, 1, 1, count_include_pad=False),
            "unequal numbers of values",
        ),
        (lambda x: F.prelu(x, THIRDS), "needs"),
        (lambda x: x.sort(-1).values, "has no rule"),  # which of equal values gets the gradient is left open
        (lambda x: x.median(-1).values, "has no rule"),
    ],
)
def test_what_no_grid_holds_is_refused(function: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(NotExact, match=why), Certifier(FLOAT64, "test"):
        function(X)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: g.clamp(-3, -1),
    "clamp_max": lambda g: g.clamp_max(-1),
    "clamp_max_": lambda g: (g * 1).clamp_max_(-1),
    "clamp_min": lambda g: g.clamp_min(2.5),
    "hardtanh": lambda g: F.hardtanh(g, -3.0, -2.0),
    "minimum": lambda g: torch.minimum(g, g.flip(-1) * 2),
}


@each("name", CHOICES)
def test_what_is_chosen_of_a_gradient_is_bounded_by_what_may_be_chosen(name: str) -> None:
    """The less of -5 and 3 has terms of 5, though that of their absolute values is 3."""
    source, cotangent = X.clone().requires_grad_(), integers(*X.shape, seed=3)
    with Certifier(FLOAT64, "test") as certifier:
        output = source * 1
        certifier.stage = "backward"
        (found,) = torch.autograd.grad(output, source, cotangent)
        chosen = CHOICES[name](found)
        bound = certifier.bound(chosen)
    assert bool((chosen.abs() <= bound.terms.reshape(chosen.shape)).all())
    assert grid_exponent(chosen) >= bound.exponent
