"""Noise of Monte Carlo arithmetic: centred, of the size of a rounding, a function of seed and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic
from fsdpcheck.comparison.precision.noise import Noise


def with_noise(function: Callable[[], Any], seed: int | None = 1, rank: int = 0) -> Any:
    with installed(), in_arithmetic(Arithmetic("own", seed), Counter(), rank):
        return function()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_is_centred_and_at_most_eps(kind: torch.dtype) -> None:
    """Of n numbers in [-1, 1] of mean 0, the mean is beyond sqrt(2 log(2 / p) / n) with probability p (Hoeffding)."""
    many = 1 << 16
    ones = torch.ones(many, dtype=kind)
    got = with_noise(lambda: ones.sqrt()).double().sub(1).div(torch.finfo(kind).eps)
    assert got.abs().max() <= 1
    assert got.abs().max() > 0.9
    assert abs(float(got.mean())) <= math.sqrt(2 * math.log(2 / 1e-9) / many)


def test_a_sum_that_cancels_has_the_noise_of_its_terms() -> None:
    terms = torch.tensor([1.0, -1.0, 1e-3])
    got = [float(with_noise(lambda: terms.sum(), seed)) - 1e-3 for seed in range(8)]
    assert max(map(abs, got)) > 1e-3 * torch.finfo(torch.float32).eps * 16
    assert torch.equal(terms, torch.tensor([1.0, -1.0, 1e-3]))


def test_exact_operators_have_none() -> None:
    x = torch.arange(12.0).reshape(3, 4) / 7

    def exact() -> list[Tensor]:
        return [x.relu(), x.t().contiguous(), torch.cat([x, x]), x.sort(dim=0).values, x[x > 0.5], -x, x.max()]

    assert all(torch.equal(a, b) for a, b in zip(with_noise(exact), exact(), strict=True))
    assert not torch.equal(with_noise(lambda: x.half()), x.half())  # a cast to a lower type rounds


def step() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*(value.detach() for value in model.parameters()), *states], torch.get_rng_state()


def test_the_scripts_random_numbers_are_its_own() -> None:
    plain, with_none, noisy = step(), with_noise(step, None), with_noise(step, 1)
    assert torch.equal(plain[1], noisy[1])
    assert all(torch.equal(a, b) for a, b in zip(plain[0], with_none[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain[0], noisy[0], strict=True))
    assert all(float(value) == 2 for value in noisy[0] if value.ndim == 0)  # steps are counted


def test_noise_follows_from_seed_and_values_and_not_from_the_rank() -> None:
    first, again, other = with_noise(step, 1, rank=0)[0], with_noise(step, 1, rank=1)[0], with_noise(step, 2)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_what_is_computed_again_in_a_backward_is_the_same() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), torch.randn(3, 6)

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        layer.zero_grad()
        run(x).square().sum().backward()
        assert layer[0].weight.grad is not None
        return layer[0].weight.grad

    kept = with_noise(partial(gradient, layer))
    computed_again = with_noise(partial(gradient, lambda given: checkpoint(layer, given, use_reentrant=False)))
    assert torch.equal(kept, computed_again)
    assert not torch.equal(kept, gradient(layer))


def test_what_lists_of_tensors_are_given_in_place_has_noise() -> None:
    def added(parts: list[Tensor]) -> list[Tensor]:
        torch._foreach_mul_(parts, 1.1)
        return parts

    got, plain = with_noise(lambda: added([torch.ones(40), torch.ones(3)])), added([torch.ones(40), torch.ones(3)])
    assert all(not torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def test_noise_warns_of_nothing_and_leaves_gradients_to_the_script() -> None:
    weight = torch.full((1,), 0.3, requires_grad=True)

    def gradient() -> Tensor:
        (weight * weight).sum().backward()
        assert weight.grad is not None
        grad, weight.grad = weight.grad, None
        return grad

    assert float(with_noise(gradient)) == pytest.approx(0.6)


@pytest.mark.parametrize("size", [5, 1 << 23])
def test_noise_is_where_the_tensor_is(size: int) -> None:
    """A device that holds no numbers stands for a GPU."""
    tensor = torch.empty(size, device="meta")
    assert Noise(3)._uniform(tensor, 7).device == tensor.device
