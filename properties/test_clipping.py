"""Clip factors and clipped sums, for implementations with any expression of the factor."""

from __future__ import annotations

from fsdpcheck import strategies
from fsdpcheck.case import Case
from fsdpcheck.checks import (
    assert_clipped_gradient_within_bound,
    assert_factors,
    assert_norms_exact,
    assert_probe_coefficients,
)
from fsdpcheck.law import law
from fsdpcheck.runner import Run


@law("clipping.coefficients", promise="private", draw=strategies.with_readable_updates(strategies.private_probe))
def test_every_sample_enters_once_with_its_clip_factor(case: Case, run: Run) -> None:
    """The coefficient of each sample in the released gradient is its clip factor min(1, C / (norm + eps)), over N.

    Black box: read from the update of a probe that the model carries. Sees factors wrong by an ulp, eps misplaced,
    samples dropped, duplicated or swapped. Source: Opacus#751, #761.
    """
    assert_probe_coefficients(run(case), run.answer(case))


@law("clipping.factors", promise="private", draw=strategies.private_probe, observe=("factors",))
def test_reported_factors_are_the_rule_applied_to_the_norms(case: Case, run: Run) -> None:
    """Reported clip factors are the declared expression of the exact per-sample norms.

    Bit for bit, or within the proven bound where the adapter declares nested norms.
    """
    assert_factors(run(case), run.answer(case))


@law("clipping.norms", promise="private", draw=strategies.private_probe, observe=("norms",))
def test_reported_norms_are_the_per_sample_gradient_norms(case: Case, run: Run) -> None:
    """Reported per-sample gradient norms are those of one sample alone on a single device.

    Returned and logged quantities are part of the contract. Source: miles_diffusion#35.
    """
    assert_norms_exact(run(case), run.answer(case))


@law("clipping.sum", promise="private", draw=strategies.with_readable_updates(strategies.private_exact))
def test_the_clipped_gradient_is_the_sum_of_clipped_gradients(case: Case, run: Run) -> None:
    """The released gradient is (1/N) * sum of c_i g_i, within the proven bound on the rounding of the weighted pass."""
    assert_clipped_gradient_within_bound(run(case), run.answer(case))
