"""The grid of a tensor is the coarsest that holds every entry, whatever way it is found."""

from __future__ import annotations

import random
from fractions import Fraction

import torch

from fsdpcheck.exact.grid import EMPTY, grid_exponent, significand_bits


def by_definition(value: float) -> int:
    exact = Fraction(value)
    twos = (exact.numerator & -exact.numerator).bit_length() - 1
    return twos - (exact.denominator.bit_length() - 1) if value else EMPTY


def test_the_exponent_is_the_least_of_the_entries() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        exponents = [draw.choice((0, 0, 1, -3, -29, -31, -60, 5, 31, 40, 70)) for _ in range(draw.randint(0, 5))]
        values = [
            draw.choice((0, 1, -1, 3, -6)) * 2.0**e if draw.random() < 0.8 else draw.gauss(0, 1) for e in exponents
        ]
        wanted = min(map(by_definition, values), default=EMPTY)
        assert grid_exponent(torch.tensor(values, dtype=torch.float64)) == wanted, values


def test_the_largest_of_floats_has_an_exponent_without_a_warning() -> None:
    assert grid_exponent(torch.tensor([torch.finfo(torch.float64).min], dtype=torch.float64)) == 1024 - 53
    assert grid_exponent(torch.tensor([torch.finfo(torch.float64).min, 0.5], dtype=torch.float64)) == -1


def test_the_bits_of_a_significand_are_those_of_one_entry_wherever_its_grid_lies() -> None:
    assert significand_bits(torch.tensor([2975.0, 1190.0])) == 12  # 2975 is odd and above 2048
    assert significand_bits(torch.tensor([0.0, 2.0**60, -(2.0**-60)])) == 1
    assert significand_bits(torch.tensor([-3.0, 0.75])) == 2
    assert significand_bits(torch.tensor([1 + 2.0**-52], dtype=torch.float64)) == 53
    assert significand_bits(torch.zeros(3)) == significand_bits(torch.zeros(0)) == 0
