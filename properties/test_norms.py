"""Aggregation of squared per-sample norms: one law a row of the table of layouts and contributions."""

from __future__ import annotations

from dataclasses import replace

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import assert_norms_exact, assert_probe_coefficients
from fsdpcheck.checks.loss_scaling import TIMES, assert_scaled
from fsdpcheck.checks.norm_additivity import assert_additive
from fsdpcheck.checks.refused_samples import assert_refused_alike
from fsdpcheck.checks.shape_matched_norms import assert_norms_near
from fsdpcheck.checks.training import assert_norms_in_dataset_order
from fsdpcheck.errors import NotApplicable
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import bounds
from fsdpcheck.program import probes
from fsdpcheck.strategies import COUNTABLE, PRIVATE_PROBE, PRIVATE_UNCLIPPED, CaseSpace, metamorphic

_ROWS = CaseSpace(clipping=("unclipped", "probe"))
_DISTRIBUTED = _ROWS.but(contributions=("complete",), replicated=False)
_PARTIAL = _DISTRIBUTED.without("hsdp").but(adjusted=("partial terms",))
"""Every rank has samples of its own, and all shard the parameters."""
_OF_SEVERAL = PRIVATE_PROBE.but(contributions=("partial", "mixed"), replicated=True, adjusted=("in replicas",))
"""Replicated batches on numbers of ranks that can be replicas of several."""
_BOTH = PRIVATE_PROBE.without("float32").but(numbers="either", adjusted=("one step", "any clip norm"))
"""One step of float64, with true functions on real numbers where they are accepted."""
_OF_PARAMETERS = PRIVATE_UNCLIPPED.without("per-layer-clipping").but(adjusted=("one step", "a bias"))
"""One unclipped step, of several parameters where a bias makes them several."""


@law(
    "norms.replicated-partial",
    promise="partial-norms",
    space=_ROWS.but(
        contributions=("partial",), replicated=True, must_occur=("several units",), vacuous_without=("several ranks",)
    ),
    observe=("norms",),
)
def test_partial_terms_of_a_replicated_batch_are_summed(case: TrainingCase, run: Run) -> None:
    """A replicated batch, each rank the norm of its own shard: squared norms summed over ranks, then one root.

    Without the sum each rank reports about 1/sqrt(W) of the norm.
    Not seen: whether the step clips by these norms (clipping.coefficients); what rounds, for the squares are exact.
    Source: claim A1; AReaL#312, pytorch#72548.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.replicated-complete",
    promise="private",
    space=_ROWS.but(
        contributions=("complete",), replicated=True, must_occur=("several units",), vacuous_without=("several ranks",)
    ),
    observe=("norms",),
)
def test_complete_terms_of_a_replicated_batch_are_not_summed(case: TrainingCase, run: Run) -> None:
    """A replicated batch, each rank the whole norm: nothing to aggregate, and all ranks agree.

    A sum makes every norm exactly sqrt(W) too big.
    Not seen: whether the step clips by these norms (clipping.coefficients); what rounds, for the squares are exact.
    Source: claim A1; twinkle#290.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.distributed-complete",
    promise="private",
    space=_DISTRIBUTED.but(must_occur=("ragged",), vacuous_without=("distributed batch on several ranks",)),
    observe=("norms",),
)
def test_norms_of_a_distributed_batch_stay_local(case: TrainingCase, run: Run) -> None:
    """A distributed batch: each rank has the norms of its own samples, in their order; nothing is summed.

    A sum by position mixes samples, sqrt(a^2 + b^2).
    Not seen: whether the step clips by these norms (clipping.coefficients), and whether anything needless is sent.
    Source: claims A2 and A3; Opacus#761, which sums so for tensor parallelism.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.dataset-order",
    promise="dataset-order",
    space=_DISTRIBUTED.but(
        must_occur=("ragged", "wrap-around"), vacuous_without=("distributed batch on several ranks",)
    ),
)
def test_norms_are_reported_by_global_sample_index(case: TrainingCase, run: Run) -> None:
    """Gathered for a report, the norms of a distributed batch are in dataset order, with wrap-around duplicates listed.

    For every sampler, uneven shares and ranks without samples included.
    Not seen: whether the sizes of what is gathered tell of the batch (privacy.collectives).
    Source: claim A3; mmpretrain#173, results of several ranks in another order than the data set's.
    """
    assert_norms_in_dataset_order(run(case, probes=(probes.ordered_norms,)), run.answer(case))


@law(
    "norms.mixed",
    promise="partial-norms",
    space=_ROWS.but(
        contributions=("mixed",), replicated=True, must_occur=("several units",), vacuous_without=("several ranks",)
    ),
    observe=("norms",),
)
def test_complete_terms_are_counted_once_beside_partial_ones(case: TrainingCase, run: Run) -> None:
    """Some parameters sharded, some replicated: partial terms summed, complete terms added once, before the root.

    Otherwise complete terms count W times.
    Not seen: one parameter that is partly sharded, partly replicated; whether the step clips by these norms.
    Source: pytorch#88955, DeepSpeed#5411.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.ignored",
    promise="features.ignored",
    space=_ROWS.but(
        contributions=("partial", "mixed"),
        replicated=True,
        must_occur=("several units",),
        vacuous_without=("several ranks",),
    ),
    observe=("norms",),
    needs_promises=("partial-norms",),
)
def test_an_ignored_parameter_counts_once_beside_partial_terms(case: TrainingCase, run: Run) -> None:
    """A replicated batch with one parameter left out of sharding: it counts once in every norm, whole on each rank.

    Whichever contributions the others have: summed over the ranks with them it would count W times.
    Not seen: more than one such parameter; whether the step clips by these norms (privacy.ignored, complete norms).
    Source: ``fully_shard(ignored_params=...)``; pytorch#88955, whole parameters beside shards of others in a norm.
    """
    assert_norms_exact(run(case, using=("ignored",)), run.answer(case))


@law(
    "norms.one-axis",
    promise="partial-norms",
    space=_OF_SEVERAL.but(ranks=4, vacuous_without=("replicated-shards",)),
    observe=("norms", "grads"),
)
def test_partial_terms_are_summed_over_the_axis_that_splits_them(case: TrainingCase, run: Run) -> None:
    """Each replica has samples of its own, its ranks all of them: partial terms are summed over those ranks alone.

    A sum over the world mixes the samples of all replicas. What is released counts each sample once, with its own
    factor.
    Not seen: a third axis; gradients of all parameters but the probe.
    Source: the table of layouts and contributions; VeOmni#184, Opacus#761.
    """
    if case.layout.kind != "by-replica" or not run.features.takes(case):
        raise NotApplicable("the ranks are no replicas of several, or each replica's share is not accepted")
    execution, answer = run(case), run.answer(case)
    assert_norms_exact(execution, answer)
    assert_probe_coefficients(execution, answer)


@law(
    "norms.refused",
    promise="partial-norms",
    space=_PARTIAL.but(ranks=2, vacuous_without=("distributed batch on several ranks",)),
)
def test_partial_terms_of_a_distributed_batch_are_refused(case: TrainingCase, run: Run) -> None:
    """Samples and elements split over the same ranks: no rank holds what is missing of any sample, so all ranks raise.

    By ValueError or NotImplementedError, before anybody waits for anybody; the same step with complete terms is taken.
    A sum, or a gather, would be numbers that mean nothing.
    Not seen: the reason: an implementation that refuses all partial terms of such a batch for another one holds.
    Source: the table of layouts and contributions; no public report known.
    """
    cause = "partial contributions are taken although the samples are split over the same ranks: nobody has the rest"
    complete = replace(case, step=replace(case.step, contribution="complete"))
    assert_refused_alike(run(case), run(complete), cause)


@law(
    "norms.scaling",
    promise="private",
    space=_BOTH.but(must_occur=("several ranks", "several units")),
    observe=("norms",),
    any_numbers=True,
)
def test_norms_grow_with_the_losses(case: TrainingCase, run: Run) -> None:
    """Losses times a power of two: norms, and the gradient where nothing is clipped, times that power, bit for bit.

    On real numbers and true functions, of layers of every kind. Sees floors, constants added to a norm, and numbers of
    few bits that underflow.
    Not seen: what is linear in the losses and wrong; numbers of few bits that keep their exponents.
    Source: jax_privacy#309, DeepSpeed#2695, claim A10.
    """
    observe = run.observe | (run.features.observables & {"grads"})
    whole, scaled = run(case, observe=observe), run(case, observe=observe, loss_times=TIMES)
    assert_scaled(whole, scaled, whole.request.clip_norm)


@law(
    "norms.additive",
    promise="private",
    space=_OF_PARAMETERS.but(user_models="never", must_occur=("several ranks", "several units")),
    observe=("norms",),
    needs_traits=("frozen",),
)
def test_squared_norms_add_up_over_the_parameters(case: TrainingCase, run: Run) -> None:
    """Freezing parameters takes their terms from every squared norm, the same ones whatever else is frozen.

    By three or four runs, without an oracle. A parameter has one term: a weight that two layers share too. Sees norms
    that are added, cross terms of layers and frozen parameters that count.
    Not seen: what is wrong in one parameter's own term; what counts whatever is frozen, where the input stage has
    parameters, which are trained in all runs.
    Source: Opacus#436.
    """
    parts = metamorphic.partly_frozen(case, run.features)
    bound = max(bounds.sample_norm_bound(run.answer(part)) for part in parts)
    assert_additive([run(part) for part in parts], bound)


@law(
    "norms.one-sided",
    promise="private",
    space=COUNTABLE.but(must_occur=("several ranks", "several units")),
    observe=("norms",),
)
def test_norms_of_real_numbers_are_not_below_the_true_ones(case: TrainingCase, run: Run) -> None:
    """On real numbers a reported norm is not below the sample's true one, nor above, by more than its sums may round.

    Float64; Linear, Embedding, EmbeddingBag and convolutions, in a user's own model true functions too. Sees what exact
    numbers hide: norms formed in fewer bits, Gram sums that cancel. A norm that is too small lets its sample through
    unclipped.
    Not seen: errors within the bound; float32; layers that normalise, whose roundings are not counted.
    Source: jax_privacy#309; claim E3.
    """
    assert_norms_near(run(case), run.features.factor.norm)
