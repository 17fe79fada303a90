"""Absolute paths of true functions: never less than the operators' own coefficients give, and refused where unknown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck.errors import NotExact
from fsdpcheck.exact.absolute_backward import TruePaths
from tests.common.tables import each

INPUT = torch.arange(24, dtype=torch.float64).square().mul(0.7).sin().mul(2).reshape(2, 4, 3)


def attention(x: Tensor) -> Tensor:
    heads = torch.stack([x, x.cos()], 1)
    return F.scaled_dot_product_attention(heads, heads * 2, heads + 1, is_causal=True)


def in_part(x: Tensor) -> Tensor:
    """Written in place where a slice of it is, twice."""
    made = x * 1
    made[:, 1:] *= 100
    made[..., :2] *= 7
    return made


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "elu": F.elu, "softplus": F.softplus, "hardswish": F.hardswish, "mish": F.mish,
    "relu": F.relu, "leaky relu": lambda x: F.leaky_relu(x, 0.25), "hardtanh": F.hardtanh, "abs": torch.abs,
    "softmax": lambda x: x.softmax(-1), "log softmax": lambda x: x.log_softmax(-1), "sin": torch.sin,
    "layer norm": nn.LayerNorm(3, dtype=torch.float64), "rms norm": nn.RMSNorm(3, dtype=torch.float64),
    "group norm": nn.GroupNorm(2, 4, dtype=torch.float64), "linear": nn.Linear(3, 2, dtype=torch.float64),
    "convolution": nn.Conv1d(4, 2, 2, dtype=torch.float64), "mean": lambda x: x.mean(1), "scores": lambda x: x @ x.mT,
    "quotient": lambda x: x / (1 + x.square()), "difference": lambda x: x[:, 1:] - 3 * x[:, :-1],
    "pool": lambda x: F.max_pool2d(x[None], 2), "attention": attention,
    "reflected": lambda x: F.pad(x, (2, 1), mode="reflect"), "circular": lambda x: F.pad(x, (2, 1), mode="circular"),
    "replicated": lambda x: F.pad(x[None], (2, 1, 3, 0), mode="replicate"),
    "a part written": in_part, "a part written by a backward": lambda x: Scaled.apply(x, in_part),
    "cross-entropy": lambda x: F.cross_entropy(x.reshape(8, 3), torch.arange(8) % 3, reduction="none"),
}  # fmt: skip


@each("layer", LAYERS.values(), ids=LAYERS)
def test_paths_are_no_less_than_the_coefficients_that_the_layer_has(layer: Callable[[Tensor], Tensor]) -> None:
    """Of sums that do not cancel: one element of the gradient at a time, then absolute values added up."""
    held = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    leaves = [INPUT.clone().requires_grad_(), *held]
    output = layer(leaves[0])
    start = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape)
    with TruePaths(start) as paths:
        found = torch.autograd.grad(output, leaves, start, retain_graph=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        least, terms = torch.zeros_like(leaf), paths.terms(gradient)
        for one in torch.eye(output.numel(), dtype=torch.float64):
            alone = (one * start.flatten()).reshape(output.shape)
            least += torch.autograd.grad(output, leaf, alone, retain_graph=True)[0].abs()
        assert bool((terms >= least * (1 - 2.0**-40)).all())
        assert bool((terms <= least.max() * 1000).all())


def test_where_terms_cancel_the_paths_do_not() -> None:
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    start = torch.tensor([1.0, -1.0], dtype=torch.float64)
    with TruePaths(start) as paths:
        (gradient,) = torch.autograd.grad(weight.expand(2) * 3.0, weight, start)
    assert (float(gradient), float(paths.terms(gradient))) == (0.0, 6.0)


class Scaled(torch.autograd.Function):
    """Has a backward of a user's own."""

    @staticmethod
    def forward(ctx: object, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.own = backward  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.own(grads[0]), None  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("backward", "said"),
    [
        (lambda g: g * g, "multiplies gradients by each other"),
        (lambda g: g.sign(), "has no rule"),
        (lambda g: g.clamp(max=1.0), "has no rule"),
        (lambda g: 1 / g, "has no rule"),
        (lambda g: g / g.sum(), "divides by a gradient"),
        (lambda g: g.float().double(), "torch.float32"),
        (lambda g: torch.ones_like(g), "was not seen"),
    ],
)
def test_what_is_not_linear_in_the_gradient_is_refused(backward: Callable[[Tensor], Tensor], said: str) -> None:
    x = INPUT.clone().requires_grad_()
    start = torch.ones_like(x)
    with pytest.raises(NotExact, match=said), TruePaths(start) as paths:
        paths.terms(torch.autograd.grad(Scaled.apply(x, backward), x, start)[0])
