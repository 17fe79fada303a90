"""Norm rules against torch.func's per-sample gradients, on integers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fsdpcheck.impl import norms
from fsdpcheck.impl.norms import embedding, layer_norm, linear


def integers(*shape: int, seed: int = 0, bound: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=generator).double()


def per_sample(module: nn.Module, inputs: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """Gradients [B, *shape] of <module(x_i), g_i> for every trainable parameter, one sample at a time."""
    trainable = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}

    def loss(parameters: dict[str, Tensor], x: Tensor, g: Tensor) -> Tensor:
        return (functional_call(module, (parameters, frozen), (x.unsqueeze(0),)) * g.unsqueeze(0)).sum()

    found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(trainable, inputs, backprops)
    return found


def assert_rule_agrees(module: nn.Module, inputs: Tensor, backprops: Tensor) -> None:
    rule = norms.rule_for(module)
    assert rule is not None
    wanted = per_sample(module, inputs, backprops)
    got = rule.per_sample_gradient(module, inputs, backprops)
    assert set(got) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name
    squared = sum((g.flatten(1).square().sum(1) for g in wanted.values()), torch.zeros(len(inputs)).double())
    assert torch.equal(rule.squared_norm(module, inputs, backprops), squared)


@pytest.mark.parametrize("shape", [(4,), (1,), (3, 4), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("frozen", ["", "weight", "bias", "weight bias"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], frozen: str, bias: bool) -> None:
    module = nn.Linear(shape[-1], 5, bias=bias).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    assert_rule_agrees(module, integers(6, *shape, seed=1), integers(6, *shape[:-1], 5, seed=2))


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_the_two_forms_of_linear_are_equal_and_both_are_chosen(length: int) -> None:
    a_BTd, g_BTp = integers(5, length, 4, seed=3), integers(5, length, 8, seed=4)
    assert torch.equal(linear.direct(a_BTd, g_BTp), linear.gram(a_BTd, g_BTp))
    assert linear.prefers_gram(length, 4, 8) == (length <= 2)


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
@pytest.mark.parametrize("positions", [(), (1,), (6,), (2, 3)])
def test_embedding(padding_idx: int | None, positions: tuple[int, ...]) -> None:
    module = nn.Embedding(4, 3, padding_idx=padding_idx).double()
    tokens = integers(5, *positions, seed=5).long().remainder(4)
    assert_rule_agrees(module, tokens, integers(5, *positions, 3, seed=6))


def test_embedding_merges_equal_tokens_of_a_sample_and_never_of_two() -> None:
    module = nn.Embedding(2, 1).double()
    ones = torch.ones(2, 3, 1).double()
    assert embedding.squared_norm(module, torch.tensor([[1, 1, 1], [0, 1, 1]]), ones).tolist() == [9.0, 5.0]


@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_layer_norm(frozen: str, positions: tuple[int, ...]) -> None:
    module = nn.LayerNorm(4, eps=0.0).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != frozen)
    signs = torch.tensor([1.0, -1, -1, 1]).double() * (integers(5, *positions, 1, seed=7, bound=1) * 2 + 1)
    assert_rule_agrees(module, signs, integers(5, *positions, 4, seed=8))


@pytest.mark.parametrize(
    ("module", "inputs", "width"),
    [
        (nn.Linear(3, 2).double(), torch.zeros(0, 5, 3).double(), 2),
        (nn.Embedding(3, 2).double(), torch.zeros(0, 5, dtype=torch.int64), 2),
        (nn.LayerNorm(3).double(), torch.zeros(0, 5, 3).double(), 3),
    ],
)
def test_no_rows_give_no_norms(module: nn.Module, inputs: Tensor, width: int) -> None:
    rule = norms.rule_for(module)
    assert rule is not None
    backprops = torch.zeros(0, 5, width).double()
    assert rule.squared_norm(module, inputs, backprops).shape == (0,)
    for gradient in rule.per_sample_gradient(module, inputs, backprops).values():
        assert gradient.shape[0] == 0


def test_rules_are_found_by_scanning_and_cover_exact_types_only() -> None:
    class Scaled(nn.Linear):
        pass

    assert set(norms.rules()) == {nn.Linear, nn.Embedding, nn.LayerNorm}
    assert norms.rule_for(nn.Linear(1, 1)) is linear
    assert norms.rule_for(nn.LayerNorm(1)) is layer_norm
    assert norms.rule_for(Scaled(1, 1)) is None


def test_rounding_never_takes_the_gram_form_below_zero() -> None:
    """Gradients that cancel: the direct form gives a tiny square, the Gram form a sum that rounds to either side."""
    draw = torch.Generator().manual_seed(0)
    a_BTd = torch.randn(64, 1, 7, generator=draw, dtype=torch.float64).expand(64, 2, 7)
    g_BTp = torch.randn(64, 1, 7, generator=draw, dtype=torch.float64)
    cancelling = torch.cat([g_BTp, -g_BTp * (1 + 2**-52)], 1)
    raw = ((a_BTd @ a_BTd.transpose(1, 2)) * (cancelling @ cancelling.transpose(1, 2))).sum((1, 2))
    assert bool((raw < 0).any())
    assert bool((linear.gram(a_BTd, cancelling) >= 0).all())
