"""Real numbers and true non-linearities: only the sum over ranks may round, and by no more than a theorem allows."""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.shape_matched_clipping import assert_clipped_sum_near, assert_factors_follow
from fsdpcheck.checks.shape_matched_replay import assert_gradients_sum, assert_updates_follow
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import COUNTABLE, REAL, REAL_PRIVATE


@law(
    "rounding.gradients",
    promise="plain",
    space=REAL.but(must_occur=("distributed batch on several ranks", "several units", "micro-batches")),
    observe=("grads",),
)
def test_the_gradient_is_the_average_of_the_ranks_own(case: TrainingCase, run: Run) -> None:
    """On real numbers, the gradient is the average of what each rank's own micro-batches give in the same shapes.

    Within (n - 1) u sum |terms|, a theorem for every order of summation; for two ranks that is one rounding. Sees
    errors of a part in 1e12 in float64 and 1e6 in float32, on layers of every kind.
    Not seen: what the replay on one device does alike.
    Source: torchtune#2172, torchtitan#2206.
    """
    assert_gradients_sum(run(case), run.features.arithmetic.unused)


@law(
    "rounding.private-gradients",
    promise="second-backward",
    space=REAL_PRIVATE.but(
        must_occur=("distributed batch on several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
    observe=("grads", "factors"),
)
def test_the_clipped_gradient_is_the_average_of_the_ranks_own(case: TrainingCase, run: Run) -> None:
    """On real numbers, the clipped gradient is the average of the ranks' own, each sample weighed by its own factor.

    Its own is the one that its rank reported. Within the same theorem's bound.
    Not seen: wrong factors, which are taken as they are reported (rounding.clip-factors, rounding.clipped-sum).
    Source: Opacus#683, Opacus#324: divisors without K, and without W.
    """
    assert_gradients_sum(run(case), run.features.arithmetic.unused)


@law(
    "rounding.clip-factors",
    promise="private",
    space=REAL_PRIVATE.but(
        must_occur=("distributed batch on several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
    observe=("norms", "factors"),
)
def test_reported_factors_follow_from_reported_norms(case: TrainingCase, run: Run) -> None:
    """On real numbers, reported clip factors are the declared rule min(1, C / (norm + eps)) of the reported norms.

    Bit for bit, or within the proven bound where the adapter declares nested norms.
    Not seen: whether those norms are right (norms.one-sided) and weigh the samples (rounding.clipped-sum).
    Source: Opacus#664, where the clip norm never reached the clipping; Opacus#751.
    """
    assert_factors_follow(run(case), run.features.factor)


@law(
    "rounding.clipped-sum",
    promise="private",
    space=COUNTABLE.but(must_occur=("distributed batch on several ranks", "several units")),
    observe=("grads",),
)
def test_what_is_released_is_the_sum_of_clipped_gradients(case: TrainingCase, run: Run) -> None:
    """On real numbers, what is released is (1/N) * sum of c_i g_i, c_i = min(1, C / (|g_i| + eps)), within a bound.

    Black box: g_i and its norm are replayed one sample at a time, and a theorem says how far any evaluation may be off;
    no reported norm or factor is taken as given. So a sample that is not clipped, or by a norm that is too small, is
    seen: of one sample alone no more than C is released. Float64.
    Not seen: errors within the bound; layers that normalise, whose roundings are not counted.
    Source: Opacus#761, jax_privacy#309.
    """
    assert_clipped_sum_near(run(case), run.features.factor, run.features.arithmetic.unused)


@law(
    "rounding.update",
    promise="plain",
    space=REAL.but(must_occur=("several ranks", "several steps", "momentum")),
    observe=("grads",),
)
def test_the_update_is_the_optimizers_for_the_gradient_shown(case: TrainingCase, run: Run) -> None:
    """Parameters move as the optimizer moves them by the gradient the implementation shows, bit for bit.

    The optimizer is elementwise, so sharding must not show, nor momentum, moments, weight decay and schedule.
    Not seen: a wrong gradient, for the one that is shown is taken as it is (rounding.gradients).
    Source: bitsandbytes#2081; Opacus#649, a schedule that never reached the optimizer that steps.
    """
    assert_updates_follow(run(case))
