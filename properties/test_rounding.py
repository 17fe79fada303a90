"""Real numbers and true non-linearities: only the sum over ranks may round, and by no more than a theorem allows."""

from __future__ import annotations

from fsdpcheck import strategies
from fsdpcheck.case import Case
from fsdpcheck.checks.matched import assert_gradients_sum, assert_updates_follow
from fsdpcheck.law import law
from fsdpcheck.runner import Run


@law("rounding.gradients", promise="plain", draw=strategies.real, observe=("grads",), needs_traits=("real",))
def test_the_gradient_is_the_average_of_the_ranks_own(case: Case, run: Run) -> None:
    """On real numbers, the gradient is the average of what each rank's own micro-batches give in the same shapes.

    Within (n - 1) u sum |terms|, a theorem for every order of summation; for two ranks that is one rounding. Sees
    errors of a part in 1e12 in float64 and 1e6 in float32, on layers of every kind; not what both sides do alike.
    """
    assert_gradients_sum(run(case))


@law(
    "rounding.private-gradients", promise="second-backward", draw=strategies.real_private, observe=("grads", "factors"),
    needs_traits=("real",),
)  # fmt: skip
def test_the_clipped_gradient_is_the_average_of_the_ranks_own(case: Case, run: Run) -> None:
    """The same with per-sample clipping, each sample weighed by the factor its rank reported."""
    assert_gradients_sum(run(case))


@law("rounding.update", promise="plain", draw=strategies.real, observe=("grads",), needs_traits=("real",))
def test_the_update_is_the_optimizers_for_the_gradient_shown(case: Case, run: Run) -> None:
    """Parameters move as the optimizer moves them by the gradient the implementation shows, bit for bit.

    The optimizer is elementwise, so sharding must not show, nor momentum, moments, weight decay and schedule.
    """
    assert_updates_follow(run(case))
