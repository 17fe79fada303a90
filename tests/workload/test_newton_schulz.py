"""The optimizer that reads whole matrices is exact in every order where it is said to be."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.errors import NotExact
from fsdpcheck.workload.newton_schulz import NewtonSchulz, require_exact


def _by_fractions(gradient: Tensor) -> list[list[Fraction]]:
    """3/2 X - 1/2 X X^T X with X the gradient over the least power of two above the sum of absolute values."""
    total = sum(abs(Fraction(float(one))) for one in gradient.reshape(-1))
    power = Fraction(2) ** math.frexp(float(total))[1]
    x = [[Fraction(float(one)) / power for one in row] for row in gradient]
    squares = [[sum((a * b for a, b in zip(one, other, strict=True)), Fraction()) for other in x] for one in x]
    cubes = [
        [sum((s * row[j] for s, row in zip(own, x, strict=True)), Fraction()) for j in range(len(x[0]))]
        for own in squares
    ]
    return [[Fraction(3, 2) * a - c / 2 for a, c in zip(*both, strict=True)] for both in zip(x, cubes, strict=True)]


def test_a_step_is_that_of_fractions_on_matrices_and_plain_elsewhere() -> None:
    generator = torch.Generator().manual_seed(5)
    for rows, columns in ((1, 1), (3, 5), (7, 2)):
        matrix, vector = nn.Parameter(torch.zeros(rows, columns).double()), nn.Parameter(torch.zeros(3).double())
        matrix.grad = torch.randint(-9, 10, (rows, columns), generator=generator).double() / 8
        vector.grad = torch.tensor([1.0, -2.0, 0.5]).double()
        require_exact(matrix.grad, 53, "here")
        NewtonSchulz([matrix, vector], lr=0.5).step()
        assert [[Fraction(float(one)) for one in row] for row in matrix.detach()] == [
            [-one / 2 for one in row] for row in _by_fractions(matrix.grad)
        ]
        assert torch.equal(vector.detach(), -0.5 * vector.grad)


def test_zeros_and_nothing_move_nothing() -> None:
    for shape in ((2, 3), (0, 3)):
        parameter = nn.Parameter(torch.ones(shape).double())
        parameter.grad = torch.zeros(shape).double()
        require_exact(parameter.grad, 1, "here")
        NewtonSchulz([parameter], lr=1.0).step()
        assert torch.equal(parameter.detach(), torch.ones(shape).double())


def test_a_step_that_may_round_is_refused_with_the_bits_that_it_takes() -> None:
    few = torch.tensor([[1.0, 0.5], [0.25, 1.0]]).double()
    require_exact(few, 53, "here")
    many = few + 2.0**-20
    with pytest.raises(NotExact, match=r"here, update of a Newton-Schulz step: needs \d+ bits; had 53"):
        require_exact(many, 53, "here")
    require_exact(many[0], 53, "a vector is moved by its gradient")
