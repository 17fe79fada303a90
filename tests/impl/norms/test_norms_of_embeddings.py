"""The norm rules of Embedding and EmbeddingBag against autograd."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.impl.norms import embedding, embedding_bag
from tests.common.tables import each
from tests.impl.norm_rules import assert_rule_agrees, integers


@each("dtype", [torch.int64, torch.int32])
@each("padding_idx", [None, 0, 3])
@each("positions", [(), (1,), (6,), (2, 3)])
def test_embedding(padding_idx: int | None, positions: tuple[int, ...], dtype: torch.dtype) -> None:
    module = nn.Embedding(4, 3, padding_idx=padding_idx).double()
    tokens = integers(5, *positions, seed=5).to(dtype).remainder(4)
    assert_rule_agrees(module, tokens, integers(5, *positions, 3, seed=6))


def test_embedding_merges_equal_tokens_of_a_sample_and_never_of_two() -> None:
    module = nn.Embedding(2, 1).double()
    ones = torch.ones(2, 3, 1).double()
    assert embedding.squared_norm(module, torch.tensor([[1, 1, 1], [0, 1, 1]]), ones).tolist() == [9.0, 5.0]


@each("dtype", [torch.int64, torch.int32])
@each("padding_idx", [None, 2])
@each("mode", ["sum", "mean"])
def test_embedding_bag(mode: str, padding_idx: int | None, dtype: torch.dtype) -> None:
    """Bags of 1, 2 or 4 tokens that count, so that means are exact; one bag holds padding only."""
    module = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding_idx).double()
    tokens = torch.tensor([[0, 0, 1, 3], [4, 4, 4, 4], [0, 1, 3, 1], [2, 2, 0, 0], [2, 2, 2, 2], [3, 2, 2, 2]]).to(
        dtype
    )
    backprops = integers(6, 3, seed=20)
    assert_bag_agrees(module, tokens, backprops)
    assert_bag_agrees(module, tokens[:, :1], backprops)
    module.weight.requires_grad_(False)
    assert embedding_bag.squared_norm(module, tokens, backprops).tolist() == [0] * 6


def assert_bag_agrees(module: nn.EmbeddingBag, tokens: Tensor, backprops: Tensor) -> None:
    """torch.func has no batching rule for bags: one sample at a time by autograd."""
    rows = [
        torch.autograd.grad(module(x[None]), module.weight, g[None])[0] for x, g in zip(tokens, backprops, strict=True)
    ]
    wanted = torch.stack(rows)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 4.0]).double()
    assert torch.equal(embedding_bag.per_sample_gradient(module, tokens, backprops)["weight"], wanted)
    assert torch.equal(embedding_bag.squared_norm(module, tokens, backprops), wanted.flatten(1).square().sum(1))
    found = embedding_bag.weighted_gradient(module, tokens, backprops, weights)["weight"]
    assert torch.equal(found, torch.tensordot(weights, wanted, dims=1))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "max"}, "picks single entries"),
        ({"max_norm": 1.0}, "changes the weight"),
        ({"scale_grad_by_freq": True}, "over the whole batch"),
        ({"sparse": True}, "sharded flat"),
        ({}, "^$"),
    ],
)
def test_bags_that_are_refused(options: dict[str, Any], reason: str) -> None:
    assert re.search(reason, embedding_bag.refusal(nn.EmbeddingBag(3, 2, **options)))


def test_bags_of_no_rows_give_no_norms() -> None:
    module = nn.EmbeddingBag(3, 2, mode="mean").double()
    tokens, backprops = torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 2).double()
    assert embedding_bag.squared_norm(module, tokens, backprops).shape == (0,)
    assert embedding_bag.per_sample_gradient(module, tokens, backprops)["weight"].shape == (0, 3, 2)
    weighted = embedding_bag.weighted_gradient(module, tokens, backprops, torch.zeros(0).double())
    assert torch.equal(weighted["weight"], torch.zeros(3, 2).double())
