"""Norm rules against torch.func's per-sample gradients, on integers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.impl import norms
from fsdpcheck.impl.norms import _tied_weights, conv, layer_norm, linear
from tests.common.tables import each
from tests.impl.norm_rules import assert_rule_agrees, integers, per_sample


@each("shape", [(4,), (1,), (3, 4), (2, 3, 4), (0, 4)])
@each("frozen", ["", "weight", "bias", "weight bias"])
@each("bias", [True, False])
def test_linear(shape: tuple[int, ...], frozen: str, bias: bool) -> None:
    module = nn.Linear(shape[-1], 5, bias=bias).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    assert_rule_agrees(module, integers(6, *shape, seed=1), integers(6, *shape[:-1], 5, seed=2))


@each("length", [1, 2, 3, 7])
def test_the_two_forms_of_linear_are_equal_and_both_are_chosen(length: int) -> None:
    a_BTd, g_BTp = integers(5, length, 4, seed=3), integers(5, length, 8, seed=4)
    assert torch.equal(linear.direct(a_BTd, g_BTp), linear.gram(a_BTd, g_BTp))
    assert linear.prefers_gram(length, 4, 8) == (length <= 2)


@each("frozen", ["", "weight", "bias"])
@each("positions", [(), (3,)])
def test_layer_norm(frozen: str, positions: tuple[int, ...]) -> None:
    module = nn.LayerNorm(4, eps=0.0).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != frozen)
    signs = torch.tensor([1.0, -1, -1, 1]).double() * (integers(5, *positions, 1, seed=7, bound=1) * 2 + 1)
    assert_rule_agrees(module, signs, integers(5, *positions, 4, seed=8))


CONVOLUTIONS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "plain": (nn.Conv1d, (5,), {}),
    "stride leaves a rest": (nn.Conv1d, (8,), {"stride": 3}),
    "padding": (nn.Conv2d, (3, 4), {"padding": (1, 2), "stride": (2, 1)}),
    "dilation": (nn.Conv2d, (5, 6), {"dilation": (2, 1)}),
    "groups": (nn.Conv1d, (4,), {"groups": 2}),
    "depthwise": (nn.Conv2d, (3, 3), {"groups": 4}),
    "volume": (nn.Conv3d, (2, 3, 2), {"padding": 1, "groups": 2, "stride": (1, 2, 1)}),
    "same": (nn.Conv2d, (3, 4), {"padding": "same", "dilation": (1, 3)}),
    "same, even kernel": (nn.Conv1d, (4,), {"padding": "same", "kernel": 2, "groups": 2}),
    "valid": (nn.Conv1d, (4,), {"padding": "valid"}),
    "reflect": (nn.Conv1d, (4,), {"padding": 2, "padding_mode": "reflect"}),
    "replicate": (nn.Conv3d, (2, 2, 3), {"padding": (1, 0, 2), "padding_mode": "replicate"}),
    "circular": (nn.Conv2d, (3, 4), {"padding": (2, 1), "padding_mode": "circular"}),
    "one position": (nn.Conv2d, (2, 2), {"groups": 2}),
    "kernel 1": (nn.Conv2d, (3, 2), {"kernel": 1}),
}
"""(type, spatial directions of the input, options beyond 4 channels to 8 and a kernel of 2, or 3 where it is odd)."""


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@each("frozen", ["", "weight", "bias"])
@each("name", CONVOLUTIONS)
def test_convolutions(name: str, frozen: str) -> None:
    kind, directions, options = CONVOLUTIONS[name]
    module = kind(4, 8, options.get("kernel", 2), **{k: v for k, v in options.items() if k != "kernel"}).double()
    for parameter_name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter_name != frozen)
    inputs = integers(5, 4, *directions, seed=9)
    assert_rule_agrees(module, inputs, integers(*module(inputs).shape, seed=10))


def test_both_forms_of_a_convolution_are_chosen_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = nn.Conv2d(4, 6, 2, groups=2).double(), integers(5, 4, 3, 3, seed=11)
    backprops = integers(5, 6, 2, 2, seed=12)
    found = []
    for chosen in (True, False):
        monkeypatch.setattr(linear, "prefers_gram", lambda T, d, p, chosen=chosen: (T, d, p) == (4, 8, 3) and chosen)
        found.append(conv.squared_norm(module, inputs, backprops))
    assert torch.equal(*found)
    monkeypatch.undo()
    assert not linear.prefers_gram(4, 8, 3)
    assert linear.prefers_gram(2, 8, 3)


def test_a_convolution_without_a_sample_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Conv1d got an input of shape \(2, 3\), wanted \[B, C, 1 directions\]"):
        conv.squared_norm(nn.Conv1d(2, 2, 1), torch.ones(2, 3), torch.ones(2, 3))


def dyadic_rows(*shape: int, groups: int = 1) -> Tensor:
    """[B, C, ...] whose values are +-k within each group, half of each sign: normalised they are +-1 exactly."""
    rows = shape[0] * groups
    count = torch.Size(shape).numel() // rows
    signs = torch.tensor([1.0, -1.0]).double().repeat(rows, count // 2)
    flipped = signs * (integers(rows, 1, seed=13, bound=0) + 1 - 2 * (integers(rows, 1, seed=14, bound=1) > 0).double())
    return (flipped * 2.0 ** integers(rows, 1, seed=15, bound=2)).reshape(shape)


@each("frozen", ["", "weight", "bias"])
@each(("positions", "groups"), [((), 1), ((), 2), ((4,), 4), ((2, 4), 2), ((2, 2, 1), 1)])
def test_group_norm(frozen: str, positions: tuple[int, ...], groups: int) -> None:
    module = nn.GroupNorm(groups, 8, eps=0.0).double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != frozen)
    inputs = dyadic_rows(5, 8, *positions, groups=groups)
    assert_rule_agrees(module, inputs, integers(5, 8, *positions, seed=16))


@each("frozen", ["", "weight"])
@each(("shape", "dims"), [((4,), 1), ((3, 4), 1), ((3, 2, 4), 1), ((3, 4), 2), ((3, 2, 4), 2)])
def test_rms_norm(frozen: str, shape: tuple[int, ...], dims: int) -> None:
    module = nn.RMSNorm(shape[-dims:], eps=0.0).double()
    module.weight.requires_grad_(frozen != "weight")
    signs = integers(5, *shape, seed=17).sign() + (integers(5, *shape, seed=17) == 0)
    assert_rule_agrees(module, 2 * signs, integers(5, *shape, seed=18))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_over_several_axes_and_without_bias(bias: bool) -> None:
    module = nn.LayerNorm((2, 4), eps=0.0, bias=bias).double()
    assert_rule_agrees(module, dyadic_rows(5, 3, 2, 4, groups=3), integers(5, 3, 2, 4, seed=19))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.GroupNorm(2, 8, eps=7.0), (8, 3)),
        (nn.LayerNorm(8, eps=7.0), (3, 8)),
        (nn.RMSNorm(8, eps=7.0), (3, 8)),
    ],
    ids=["group", "layer", "rms"],
)
def test_a_norm_adds_its_own_eps(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Of values +-3 the variance and the mean square are 9, and 9 + 7 has an exact root."""
    inputs = 3 * torch.tensor([1.0, -1, -1, 1]).double().repeat(5 * 6).reshape(5, *shape)
    if isinstance(module, nn.GroupNorm):  # 4 channels of 3 positions a group
        assert not inputs.reshape(5, 2, -1).sum(2).any()
    assert_rule_agrees(module.double(), inputs, integers(5, *shape, seed=20))


@pytest.mark.parametrize("norm", [nn.LayerNorm(4, elementwise_affine=False), nn.RMSNorm(4, elementwise_affine=False)])
def test_a_norm_without_parameters_has_no_gradient(norm: nn.Module) -> None:
    rule = norms.rule_for(norm)
    assert rule is not None
    assert rule.squared_norm(norm, torch.ones(3, 4), torch.ones(3, 4)).tolist() == [0, 0, 0]
    assert rule.weighted_gradient(norm, torch.ones(3, 4), torch.ones(3, 4), torch.ones(3)) == {}


@each(
    ("module", "inputs", "width"),
    [
        (nn.Linear(3, 2).double(), torch.zeros(0, 5, 3).double(), 2),
        (nn.Embedding(3, 2).double(), torch.zeros(0, 5, dtype=torch.int64), 2),
        (nn.LayerNorm(3).double(), torch.zeros(0, 5, 3).double(), 3),
        (nn.RMSNorm(3).double(), torch.zeros(0, 5, 3).double(), 3),
        (nn.GroupNorm(1, 5).double(), torch.zeros(0, 5, 3).double(), 3),
        (nn.Conv1d(5, 5, 1, padding=1).double(), torch.zeros(0, 5, 3).double(), 5),
        (nn.Conv1d(5, 5, 3, padding=1, padding_mode="circular").double(), torch.zeros(0, 5, 3).double(), 3),
    ],
)
def test_no_rows_give_no_norms(module: nn.Module, inputs: Tensor, width: int) -> None:
    rule = norms.rule_for(module)
    assert rule is not None
    backprops = torch.zeros(0, 5, width).double()
    assert rule.squared_norm(module, inputs, backprops).shape == (0,)
    for gradient in rule.per_sample_gradient(module, inputs, backprops).values():
        assert gradient.shape[0] == 0
    weighted = rule.weighted_gradient(module, inputs, backprops, torch.zeros(0).double())
    for name, parameter in module.named_parameters():
        assert torch.equal(weighted[name], torch.zeros_like(parameter)), name


def test_rules_are_found_by_scanning_and_cover_exact_types_only() -> None:
    class Scaled(nn.Linear):
        pass

    convolutions = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
    others = {nn.MultiheadAttention, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm}
    assert set(norms.rules()) == convolutions | others
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


@each("uses", [2, 3])
@each("tokens", [0, 1, 2])
@each("positions", [1, 2, 6])
def test_the_norm_of_a_weight_used_several_times_is_that_of_the_sum(uses: int, tokens: int, positions: int) -> None:
    """``tokens`` of the uses are by an Embedding [5, 3], the rest by a Linear; against the sum of their gradients."""
    table, head = nn.Embedding(5, 3, padding_idx=1).double(), nn.Linear(3, 5, bias=False).double()
    given: list[tuple[nn.Module, Tensor, Tensor]] = []
    for use in range(uses):
        if use < tokens:
            inputs = integers(4, positions, seed=30 + use).long().remainder(5)
            given.append((table, inputs, integers(4, positions, 3, seed=40 + use)))
        else:
            given.append((head, integers(4, positions, 3, seed=50 + use), integers(4, positions, 5, seed=60 + use)))
    total = torch.zeros(4, 5, 3).double()
    for module, inputs, backprops in given:
        total += per_sample(module, inputs, backprops)["weight"]
    apart = sum((_tied_weights.squared_norm([use]) for use in given), torch.zeros(4).double())
    assert torch.equal(_tied_weights.squared_norm(given), total.square().sum((1, 2)))
    assert not torch.equal(_tied_weights.squared_norm(given), apart)
