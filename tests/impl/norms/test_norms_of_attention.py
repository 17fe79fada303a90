"""The norm rule of multi-head attention against autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpcheck.impl.norms import linear, multihead_attention
from tests.common.tables import each
from tests.impl.norm_rules import integers

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": torch.tensor([[False, True], [False, False]])},
    "padding": {"key_padding_mask": torch.tensor([[False, True], [False, False], [True, False]])},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {},
    "without biases": {"bias": False},
    "keys and values of other widths": {"kdim": 3, "vdim": 5},
    "two positions more": {"add_bias_kv": True, "add_zero_attn": True},
}


def attention(options: str, frozen: str) -> nn.MultiheadAttention:
    """Keys are zero: all positions that may be attended to get equal weights."""
    module = nn.MultiheadAttention(32, 2, batch_first=True, **OPTIONS[options]).double()
    for seed, (name, parameter) in enumerate(module.named_parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
        parameter.requires_grad_(name != frozen)
    keys = module.k_proj_weight if module.in_proj_weight is None else module.in_proj_weight[32:64]
    for zero in (keys, None if module.in_proj_bias is None else module.in_proj_bias[32:64], module.bias_k):
        if zero is not None:
            zero.data.zero_()
    return module


@each(
    ("mask", "options"),
    [*((mask, "packed") for mask in MASKS), *(("none", options) for options in OPTIONS if options != "packed")],
)
@each("frozen", ["", "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", "bias_v"])
def test_multihead_attention(mask: str, options: str, frozen: str) -> None:
    """All positions that may be attended to get equal weights: 1, 1/2 or 1/4."""
    module, given = attention(options, frozen), MASKS[mask]
    x, g = integers(3, 2, 32, seed=21), integers(3, 2, 32, seed=22)
    inputs = (x, *(integers(3, 2, OPTIONS[options].get(name, 32), seed=23) for name in ("kdim", "vdim")))
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanted: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for i in range(3):
        own = {name: value if name == "attn_mask" else value[i : i + 1] for name, value in given.items()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused backward takes exp of a rounded log
            y = module(*[part[i : i + 1] for part in inputs], need_weights=False, **own)[0]
        for name, found in zip(trainable, torch.autograd.grad(y, list(trainable.values()), g[i : i + 1]), strict=True):
            wanted[name].append(found)
    call = multihead_attention.call(inputs, given)
    got = multihead_attention.per_sample_gradient(module, call, g)
    weights = torch.tensor([0.5, 0.0, 2.0]).double()
    weighted = multihead_attention.weighted_gradient(module, call, g, weights)
    squared = torch.zeros(3).double()
    for name, rows in wanted.items():
        assert torch.equal(got[name], torch.stack(rows)), name
        assert torch.equal(weighted[name], torch.tensordot(weights, torch.stack(rows), dims=1)), name
        squared += torch.stack(rows).flatten(1).square().sum(1)
    assert set(got) == set(weighted) == set(wanted)
    assert torch.equal(multihead_attention.squared_norm(module, call, g), squared)
    assert torch.equal(multihead_attention.flash_squared_norm(module, call, g), squared)


def test_half_of_an_attention_s_samples_are_those_samples() -> None:
    """What is kept for bookkeeping can be cut down to some samples, none, or none at all."""
    module = attention("packed", "")
    x, g = integers(3, 2, 32, seed=21), integers(3, 2, 32, seed=22)
    found = multihead_attention.products(module, multihead_attention.call((x, x, x), {}), g)
    gradients = found.per_sample_gradient()
    for rows in (torch.tensor([0, 2]), torch.tensor([], dtype=torch.int64)):
        for name, own in found.only(rows).per_sample_gradient().items():
            assert torch.equal(own, gradients[name][rows])
    empty = multihead_attention.products(module, multihead_attention.call((x[:0],) * 3, {}), g[:0])
    assert empty.squared_norm(linear.weight_squared_norm).shape == (0,)
    assert not any(value.any() for value in empty.weighted_gradient(torch.zeros(0).double()).values())


def test_positions_of_an_attention_s_arguments_do_not_matter() -> None:
    x, mask = torch.ones(2, 2, 4), torch.zeros(2, 2)
    call = multihead_attention.call((x, x, x, None, False, mask), {})
    assert len(call.rows()) == 3
    assert call.keywords["attn_mask"] is mask
