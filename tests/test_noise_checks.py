"""Checks of noise: error rates by exact probabilities, and each thing that is wrong with fabricated gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from fsdpcheck import oracle, proof
from fsdpcheck.case import BatchLayout, Case, LayerSpec, ModelSpec, StepSpec
from fsdpcheck.checks import noise as noise_checks
from fsdpcheck.checks.noise import FALSE_ALARM, assert_noise_once, assert_noise_scale, scale_limits
from fsdpcheck.errors import UsageError, Violation
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord

N = 560 * 560
CASE = Case(ModelSpec((LayerSpec(2, frozen="bias", bias=True),)), layout=BatchLayout(batch_size=2))


def outside(n: int, factor: float) -> float:
    """Probability that n Gaussians of standard deviation ``factor`` leave the limits."""
    low, high = (n * limit**2 / factor**2 for limit in scale_limits(n))
    return float(chi2.cdf(low, n) + chi2.sf(high, n))


def test_right_noise_is_called_wrong_once_in_a_million_at_most_and_one_percent_off_found_with_probability_99() -> None:
    assert outside(N, 1.0) <= FALSE_ALARM
    assert all(outside(n, 1.0) <= FALSE_ALARM for n in (1, 10, 1000, 100_000))
    assert min(outside(N, 0.99), outside(N, 1.01)) >= 0.99


@pytest.mark.parametrize("world_sizes", [(1,), (1, 2, 3, 4, 5), (3,), (8, 16)])
def test_the_large_case_releases_nothing_but_noise_and_is_proved(world_sizes: tuple[int, ...]) -> None:
    case = noise_checks.large_and_empty(world_sizes)
    answer = oracle.answer(case)
    proof.prove(case, answer)
    assert case.world_size in world_sizes
    assert not any(value.any() for value in answer.steps[0].used.values())
    assert max(value.numel() for value in answer.steps[0].used.values()) == N


def run(case: Case, *grads: dict[str, Tensor], moved: float = 0.0) -> Execution:
    """One rank that shows ``grads`` step by step; its frozen bias moves by ``moved``."""
    before = {"tail.linear0.bias": torch.zeros(2)}
    after = {"tail.linear0.bias": torch.zeros(2) + moved}
    case = replace(case, step=replace(case.step, steps=len(grads)))
    result = RankResult(0, before, [StepRecord(after, own) for own in grads])
    return Execution("fabricated", RunRequest(case, "reference"), [result])


def gradient(*values: float) -> dict[str, Tensor]:
    return {"tail.linear0.weight": torch.tensor(values, dtype=torch.float64)}


def test_noise_that_is_missing_repeated_or_on_frozen_parameters_is_found() -> None:
    clean = run(CASE, gradient(1.0, 2.0), gradient(5.0, 6.0))
    assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.0, 8.0)), clean)
    with pytest.raises(Violation, match="has no noise"):
        assert_noise_once(run(CASE, gradient(1.5, 2.0), gradient(4.0, 8.0)), clean)
    with pytest.raises(Violation, match="used twice") as caught:
        assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.0, 6.5)), clean)
    assert caught.value.cause == "it is the draw of step 0, tail.linear0.weight, element 0"
    with pytest.raises(Violation, match="a frozen parameter moved"):
        assert_noise_once(run(CASE, gradient(1.5, 2.25), gradient(4.0, 8.0), moved=1.0), clean)


def test_the_scale_is_that_of_the_noise_not_of_the_sum() -> None:
    case = noise_checks.large_and_empty((1,))
    answer = oracle.answer(case)
    deviation = 1.5 * answer.clip_norm / 32
    drawn = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * deviation
    assert_noise_scale(run(case, {"w": drawn}), answer)
    for factor in (0.98, 1.02, math.sqrt(2), 0.0):
        with pytest.raises(Violation, match="wrong scale"):
            assert_noise_scale(run(case, {"w": drawn * factor}), answer)
    full = replace(case, model=ModelSpec((LayerSpec(1),)), layout=BatchLayout(), step=StepSpec("linear"))
    with pytest.raises(UsageError, match="empty batch"):
        assert_noise_scale(run(full, {"w": drawn}), oracle.answer(full))
