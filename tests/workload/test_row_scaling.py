"""The optimizer that reads whole rows is exact where it is said to be."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from fsdpcheck.errors import NotExact
from fsdpcheck.workload.row_scaling import RowScaled, require_exact


def test_a_step_is_that_of_fractions_on_matrices_and_plain_elsewhere() -> None:
    generator = torch.Generator().manual_seed(5)
    for shape in ((1, 1), (3, 5), (7, 2), (0, 3)):
        matrix, vector = nn.Parameter(torch.zeros(shape).double()), nn.Parameter(torch.zeros(3).double())
        matrix.grad = torch.randint(-9, 10, shape, generator=generator).double() / 8
        vector.grad = torch.tensor([1.0, -2.0, 0.5]).double()
        require_exact(matrix.grad, 53, "here")
        RowScaled([matrix, vector], lr=0.5).step()
        for row, gradient in zip(matrix.detach(), matrix.grad, strict=True):
            total = float(sum(abs(Fraction(float(one))) for one in gradient))
            power = Fraction(2) ** math.frexp(total)[1]
            assert [Fraction(float(one)) for one in row] == [-Fraction(float(one)) / power / 2 for one in gradient]
        assert torch.equal(vector.detach(), -0.5 * vector.grad)


def test_a_row_whose_sum_may_round_is_refused_with_the_bits_that_it_takes() -> None:
    wide = torch.tensor([[1.0, 0.5], [1.0, 2.0**-30]]).double()
    require_exact(wide, 31, "here")
    with pytest.raises(NotExact, match="here, the sum of a row of a gradient: needs 31 bits; had 30"):
        require_exact(wide, 30, "here")
    require_exact(wide[1], 2, "a vector is moved by its gradient")
