"""What operators choose of floats is kept in its order, with its line, and noise is seen to change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic
from fsdpcheck.comparison.record import Choice


def chosen(function: Callable[[], Any], noise: int | None = None) -> list[Choice]:
    with installed(), in_arithmetic(Arithmetic("float64", noise), Counter(), 0) as choices:
        function()
    assert choices is not None
    return choices.made


def tied() -> Tensor:
    """Three thirds of seven, computed."""
    return torch.ones(7, 3) / 7


WAYS: dict[str, Callable[[], Any]] = {
    "argmax": lambda: tied().argmax(-1),
    "topk": lambda: tied().topk(2),
    "sort": lambda: tied().sort(),
    "max": lambda: tied().max(-1),
    "gt": lambda: tied() > 1 / 7,
    "floor": lambda: (tied() * 7).floor(),
    "_to_copy": lambda: (tied() * 7).long(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_an_operator_chooses_is_kept_with_its_line_and_noise_changes_it_where_values_are_tied(way: str) -> None:
    (clean,), (again,) = chosen(WAYS[way]), chosen(WAYS[way])
    assert clean.operator == way
    assert clean.line.startswith(f"{__file__}:")
    assert torch.equal(clean.made, again.made)
    noisy = [chosen(WAYS[way], seed)[0] for seed in range(4)]
    assert any(not torch.equal(one.made, clean.made) for one in noisy)


def test_what_is_no_choice_between_floats_is_not_kept() -> None:
    assert chosen(lambda: torch.arange(3).argmax()) == []
    assert chosen(lambda: torch.arange(3) > 1) == []
    assert chosen(lambda: tied().amax()) == []


def test_of_very_much_the_small_ones_are_kept() -> None:
    large = torch.ones(1 << 22)
    made = chosen(lambda: (large > 0, large > 0, large[:3] > 0, large[0] > 0))
    assert [len(choice.made) for choice in made] == [1 << 22]
    assert len(chosen(lambda: [large[0] > 0 for _ in range(1 << 14 | 1)])) == 1 << 14
