"""Norms and factors, and what an instrument reads of them, may come of either square root; norms of no third one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.checks import square_roots
from fsdpcheck.checks.clipping import assert_factors, assert_norms_exact, assert_probe_coefficients
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from tests.common.fabricated import clipped, execution, right_weights, weighted
from tests.common.later import later

RIGHT = later(clipped("probe", clip_norm=16))
Check = Callable[[Execution, Answer], None]
CHECKS: list[Check] = [assert_norms_exact, assert_factors, assert_probe_coefficients]


def moved(answer: Answer, units: int) -> Answer:
    """The answer of a CPU whose square roots are so many units in the last place beside the right ones."""

    def near(values: Tensor) -> Tensor:
        for _ in range(abs(units)):
            values = torch.nextafter(values, torch.full_like(values, units * torch.inf))
        return values

    found = []
    for number, step in enumerate(answer.steps):
        norms = near(square_roots.rounded(step.squared_norms.to(step.norms.dtype)))
        factors = oracle.factors(norms, answer.clip_norm, answer.rule)
        own = replace(step, norms=norms, factors=factors)
        one = replace(answer, steps=(*answer.steps[:number], own, *answer.steps[number + 1 :]))
        found.append(replace(own, used=weighted(one, right_weights(one, number), number)))
    return replace(answer, steps=tuple(found))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("units", [-1, 0, 1])
def test_the_root_of_torch_and_the_rounded_one_are_both_right(check: Check, units: int) -> None:
    """Whatever torch's is on the CPU at hand."""
    there = moved(RIGHT, units)
    for shown in (moved(RIGHT, 0), there):
        check(execution(shown), there)


@pytest.mark.parametrize("check", CHECKS[:2])
@pytest.mark.parametrize("units", [-3, -2, 2, 3])
def test_no_third_root_is_right(check: Check, units: int) -> None:
    """What the instrument reads is divided by three ranks, which may round as much."""
    with pytest.raises(Violation):
        check(execution(moved(RIGHT, units)), moved(RIGHT, 1 if units < 0 else -1))


def test_roots_of_squares_are_exact_and_the_others_within_a_unit_on_this_machine() -> None:
    """What the bounds count on. Scaling by a power of four, as the laws of scaling do, moves no bit."""
    numbers = torch.arange(1, 2**16, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        n = numbers.to(dtype)[: 4095 if dtype == torch.float32 else None]
        assert torch.equal((n * n).sqrt(), n)
        assert torch.equal(square_roots.rounded(n * n), n)
        right = torch.from_numpy(numpy.sqrt(numbers.to(dtype).numpy()))
        found = numbers.to(dtype).sqrt()
        assert bool(((found == right) | (torch.nextafter(found, right) == right)).all())
        assert torch.equal((numbers.to(dtype) * 2.0**-60).sqrt(), found * 2.0**-30)
