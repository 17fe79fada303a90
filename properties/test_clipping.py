"""Clip factors and clipped sums, for implementations with any expression of the factor."""

from __future__ import annotations

from fsdpcheck.adapters.contract import Observable
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import (
    assert_clipped_gradient_within_bound,
    assert_factors,
    assert_norms_exact,
    assert_probe_coefficients,
)
from fsdpcheck.checks.nonfinite_samples import assert_refused_or_left_out, spoiled
from fsdpcheck.checks.refused_or_right import USES, assert_refused_or_norms
from fsdpcheck.checks.refused_samples import assert_refused_alike
from fsdpcheck.errors import NotApplicable
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import HIDING, PRIVATE_EXACT, PRIVATE_PROBE, CaseSpace, Family

_EXACT = CaseSpace(clipping=("unclipped", Family("exact", ("exact-factors",))))
"""Families in which the sum of the others is promised bit for bit; factors below 1 where they are exact."""
_WITH_A_LAYER_MORE = PRIVATE_PROBE.without("conv-private", "bags-private", "group-norm-private", *HIDING)
"""Of inputs behind which one more Linear can stand."""


@law(
    "clipping.coefficients",
    promise="private",
    space=PRIVATE_PROBE.without(*HIDING).but(
        must_occur=("distributed batch on several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
)
def test_every_sample_enters_once_with_its_clip_factor(case: TrainingCase, run: Run) -> None:
    """The coefficient of each sample in the released gradient is its clip factor min(1, C / (norm + eps)), over N.

    Black box: read from the update of a probe that the model carries. Sees factors wrong by an ulp, eps misplaced,
    samples dropped, duplicated or swapped.
    Not seen: gradients of all parameters but the probe (clipping.sum).
    Source: Opacus#751, Opacus#761.
    """
    assert_probe_coefficients(run(case), run.answer(case))


@law(
    "clipping.factors",
    promise="private",
    space=PRIVATE_PROBE.but(
        must_occur=("distributed batch on several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
    observe=("factors",),
)
def test_reported_factors_are_the_rule_applied_to_the_norms(case: TrainingCase, run: Run) -> None:
    """Reported clip factors are the declared expression of the exact per-sample norms.

    Bit for bit, or within the proven bound where the adapter declares nested norms.
    Not seen: whether samples are weighed by the factors that are reported (clipping.coefficients).
    Source: Opacus#664, where the clip norm never reached the clipping; Opacus#751.
    """
    assert_factors(run(case), run.answer(case))


@law(
    "clipping.norms",
    promise="private",
    space=PRIVATE_PROBE.but(
        must_occur=("distributed batch on several ranks", "several units", "micro-batches"),
        vacuous_without=("non-zero gradient",),
    ),
    observe=("norms",),
)
def test_reported_norms_are_the_per_sample_gradient_norms(case: TrainingCase, run: Run) -> None:
    """Reported per-sample gradient norms are those of one sample alone on a single device.

    So squares add up over parameters, layers and units, whichever are frozen, and neither the other rows of a
    micro-batch nor their number has a say. Returned and logged quantities are part of the contract.
    Not seen: whether the step clips by the norms that it reports; what rounds, for the squares are exact.
    Source: miles_diffusion#35, Opacus#751, Opacus#413.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "clipping.sum",
    promise="private",
    space=PRIVATE_EXACT.without(*HIDING).but(
        must_occur=("distributed batch on several ranks", "several units", "unclipped sample"),
        vacuous_without=("clipped sample",),
    ),
)
def test_the_clipped_gradient_is_the_sum_of_clipped_gradients(case: TrainingCase, run: Run) -> None:
    """The released gradient is (1/N) * sum of c_i g_i, within the proven bound on the rounding of the weighted pass.

    Not seen: errors within the bound; an eps that is left out (clipping.coefficients).
    Source: Opacus#511, a gradient counted twice; Opacus#683, K micro-batches and a divisor without K.
    """
    assert_clipped_gradient_within_bound(run(case), run.answer(case))


@law(
    "clipping.nonfinite",
    promise="nonfinite",
    space=_EXACT.but(must_occur=("distributed batch on several ranks",)),
)
def test_a_sample_without_a_norm_is_refused_by_all_or_left_out(case: TrainingCase, run: Run) -> None:
    """A sample whose gradient is NaN or infinite: all ranks raise and name it, or the step is that without it.

    Bit for bit; where they raise, what each rank trains is as it was before the step. The sample's targets are what is
    spoiled.
    Not seen: the optimizer's state, and whether the trainer can go on after it has raised.
    Source: DeepSpeed#7171, fairscale#180.
    """
    pair = spoiled(case)
    observe: frozenset[Observable] = run.features.observables & {"grads"}
    execution = run(pair.case, observe=observe, spoiled=((pair.sample, pair.value),), given_for=pair.without)
    assert_refused_or_left_out(execution, pair, run.answer(pair.without))


@law(
    "clipping.one-row",
    promise="private",
    space=_WITH_A_LAYER_MORE.but(
        user_models="never",
        must_occur=("distributed batch on several ranks",),
        vacuous_without=("non-zero gradient",),
        adjusted=("one row",),
    ),
    observe=("norms",),
)
def test_a_layer_on_one_row_for_all_samples_is_refused_or_has_norms(case: TrainingCase, run: Run) -> None:
    """A layer that runs on one row for all samples, as a table of positions may, is refused, or norms are exact.

    Its gradient comes summed over the samples of a micro-batch: no norm follows from it. In each drawn case such a
    layer stands behind the input, and what it gives is added to every sample.
    Not seen: the reason of what is raised; whether all ranks raise, where one that has a single sample can go on.
    Source: Opacus#841, Opacus#845; GPT-2 in transformers, whose positions are one row.
    """
    assert_refused_or_norms(lambda one: (run(one), run.answer(one)), case)


@law(
    "clipping.beside",
    promise="private",
    space=_WITH_A_LAYER_MORE.but(
        user_models="never",
        must_occur=("distributed batch on several ranks",),
        vacuous_without=("non-zero gradient",),
        adjusted=("beside",),
    ),
    observe=("norms",),
)
def test_a_weight_used_beside_its_layer_is_refused_or_counts(case: TrainingCase, run: Run) -> None:
    """A weight that code uses without calling the module that holds it is refused, or norms are exact.

    What that use adds to its gradient is in no hook of the layer: without it a sample's norm is too small, and it is
    clipped too little. In each drawn case a Linear stands behind the input to whose output F.linear with its weight is
    added.
    Not seen: the reason of what is raised; other ways to use a weight, as an Embedding's by an output layer.
    Source: Opacus#738, where uses of one weight do not count together; no public report known of one without a module.
    """
    assert_refused_or_norms(lambda one: (run(one), run.answer(one)), case)


@law(
    "clipping.across-samples",
    promise="across-samples",
    space=_WITH_A_LAYER_MORE.but(
        user_models="never",
        must_occur=("distributed batch on several ranks",),
        adjusted=("across samples",),
    ),
)
def test_what_computes_across_samples_is_refused(case: TrainingCase, run: Run) -> None:
    """A model or a loss that computes across the samples of a micro-batch is refused by all ranks, and not without it.

    By ValueError or NotImplementedError, before anybody waits for anybody. Where a sample's loss depends on another's
    row it has no gradient of its own: what is clipped bounds nobody's influence, and nothing in the step shows it. In
    each drawn case a layer behind the input gives a sample what the one before gets too, or is given the samples in
    another order than theirs; or the loss takes two samples' outputs, or targets.
    Not seen: the reason of what is raised; running statistics, what integers are mixed before real numbers are made of
    them, and batches of which no micro-batch has two samples.
    Source: Opacus' documentation of BatchNorm (opacus.ai/docs/faq), no public report known; DP-SGD, arXiv:1607.00133.
    """
    if "across-samples-private" not in case.requires():
        raise NotApplicable("no two samples meet")
    cause = "samples of a micro-batch meet in the model or in the loss, and the step is taken: norms are of mixtures"
    assert_refused_alike(run(case), run(USES.without(case)), cause)
