"""What a kernel's wrong squared norm is: positions apart, fewer bits, the beginning of a tensor; else a multiple."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fsdpcheck.case import KernelCase, KernelSpec
from fsdpcheck.diagnosis import bits
from fsdpcheck.diagnosis.norm_kernels import of_squared_norm, of_unread
from fsdpcheck.findings.cause import named
from fsdpcheck.program import kernel_data

CASE = KernelCase(KernelSpec(samples=2, positions=5, inputs=3, outputs=17, bound=4), seed=3)


def squared(case: KernelCase, positions: int = 99, inputs: int = 99, outputs: int = 99) -> float:
    """That of sample 1, of the first of each."""
    a_Td, g_Tp = (value[1].double() for value in kernel_data.tensors(case.kernel, case.seed))
    return float((g_Tp[:positions, :outputs].T @ a_Td[:positions, :inputs]).square().sum())


def cause(got: float, case: KernelCase = CASE, bound: Fraction = Fraction(0)) -> str:
    right = kernel_data.exact(case.kernel, case.seed)[0][1]
    assert not math.isfinite(got) or abs(Fraction(got) - right) > bound, "it is right"
    return named(of_squared_norm(case, 1, got, right, bound))


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"outputs": 16}, "the first 16 of 17 output features"),
        ({"outputs": 3}, "the first 3 of 17 output features"),
        ({"inputs": 2}, "the first 2 of 3 input features"),
        ({"positions": 4}, "the first 4 of 5 positions"),
    ],
)
def test_the_beginning_of_a_tensor_is_named(kept: dict[str, int], said: str) -> None:
    assert cause(squared(CASE, **kept)) == f"it is the norm of {said}: the tile at the end is left out"


def test_within_a_bound_too() -> None:
    spec = KernelSpec(samples=2, positions=4, inputs=3, outputs=17, numbers="real")
    case = KernelCase(spec, seed=5)
    got = float(torch.tensor(squared(case, outputs=16), dtype=torch.float32))
    said = "it is the norm of the first 16 of 17 output features: the tile at the end is left out"
    assert cause(got, case, Fraction(1, 10**6)) == said


def test_other_mistakes_are_what_they_were() -> None:
    right = kernel_data.exact(CASE.kernel, CASE.seed)[0][1]
    apart = kernel_data.by_position(CASE.kernel, CASE.seed)[1]
    assert cause(float(apart)) == "each position is squared by itself: terms of two positions are missing"
    assert cause(float(3 * right)) == "it is 3 times the right one"
    assert cause(math.nan) == named(of_unread(math.nan)) == "it reads beside its inputs, or what nobody has written"
    assert of_unread(1.0) == []


def test_few_bits_are_named_of_real_numbers_alone_for_small_integers_have_few() -> None:
    case = KernelCase(replace(CASE.kernel, numbers="real"), seed=5)
    right = kernel_data.exact(case.kernel, case.seed)[0][1]
    coarse = float(bits.rounded(torch.tensor(float(right), dtype=torch.float64), 8))
    assert cause(coarse, case, Fraction(1, 10**9)) == "the norm is rounded to 8 bits, the precision of bfloat16"
    whole = kernel_data.exact(CASE.kernel, CASE.seed)[0][1]
    assert "bits" not in cause(float(bits.rounded(torch.tensor(float(whole), dtype=torch.float64), 4)))


def test_nothing_at_all_is_the_beginning_of_nothing() -> None:
    assert "first" not in cause(0.0)
