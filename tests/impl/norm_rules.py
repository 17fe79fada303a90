"""Norm rules of one layer, held against per-sample gradients from autograd."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fsdpcheck.impl import norms


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
    weights = 2.0 ** integers(len(inputs), seed=99) * (integers(len(inputs), seed=98) > -2)
    weighted = rule.weighted_gradient(module, inputs, backprops, weights)
    assert set(weighted) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.equal(weighted[name], torch.tensordot(weights, gradient, dims=1)), name
