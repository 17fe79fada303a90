"""A raised script begins at the same numbers: what it draws is drawn in its own type."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.comparison.precision.raising import Block, assert_all_is_raised, raised

DRAWS: dict[str, Callable[[], Tensor]] = {
    "a parameter of a module": lambda: nn.Linear(5, 7).weight,
    "of a module cast to bfloat16": lambda: nn.Linear(5, 7).bfloat16().weight,
    "of a module made in bfloat16": lambda: nn.Linear(5, 7, dtype=torch.bfloat16).weight,
    "by default in bfloat16": lambda: with_default(torch.bfloat16, lambda: nn.Linear(5, 7).weight),
    "in float64 of the script": lambda: torch.empty(40, dtype=torch.float64).normal_(),
    "of the type of another": lambda: torch.randn(9, dtype=torch.ones(1).dtype),
    "into one of the type of another": lambda: torch.empty(9, dtype=torch.ones(1).dtype).normal_(),
    "float64 by default": lambda: with_default(torch.float64, lambda: torch.rand(9)),
    "float64 that is named": lambda: torch.randn(9, dtype=torch.float64),
    "a truncated normal": lambda: nn.init.trunc_normal_(torch.empty(6, 6), std=0.02),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(6, 6)),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.Tensor(6, 6)),
    "a slice": lambda: torch.zeros(6, 40)[:, ::2].normal_(0.1, 2),
    "a transposed one": lambda: torch.zeros(6, 40).t().uniform_(-1, 1),
    "like another": lambda: torch.randn_like(torch.zeros(9, dtype=torch.bfloat16)),
    "of a probability": lambda: torch.bernoulli(torch.full((30,), 0.3)),
    "exponential": lambda: torch.empty(20).exponential_(),
    "uniform": lambda: torch.rand(20),
    "in half": lambda: torch.rand(20, dtype=torch.float16),
    "integers": lambda: torch.randint(0, 9, (20,)),
    "integers as floats": lambda: torch.randint(0, 9, (20,), dtype=torch.float32),
    "a permutation": lambda: torch.randperm(20),
    "of weights": lambda: torch.multinomial(torch.arange(1.0, 9), 30, replacement=True),
    "a FloatTensor": lambda: nn.init.xavier_uniform_(torch.FloatTensor(4, 5)),
    "a whole block": lambda: torch.cat([value.flatten() for value in Block().parameters()]),
    "a deep copy, drawn again": lambda: nn.init.normal_(copy.deepcopy(nn.Linear(3, 20)).weight),
}


def with_default(kind: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_is_the_same_number_and_the_generator_is_left_as_it_is(draw: str) -> None:
    def drawn() -> tuple[Tensor, Tensor]:
        torch.manual_seed(11)
        return DRAWS[draw]().detach(), torch.get_rng_state()

    expected, state = drawn()
    with raised() as notes:
        got, state_raised = drawn()
    assert got.dtype == (torch.float64 if expected.is_floating_point() else expected.dtype)
    assert torch.equal(got, expected.to(got.dtype))
    assert torch.equal(state, state_raised)
    assert_all_is_raised(notes)


def test_a_normal_draw_of_computed_means_is_not_rounded() -> None:
    with raised():
        mean = torch.full((9,), 1 / 3)
        torch.manual_seed(1)
        got = torch.normal(mean, 0.5)
        torch.manual_seed(1)
        assert torch.equal(got, mean + 0.5 * torch.randn(9))
    assert not torch.equal(got, got.float().double())
