"""Aggregation of squared per-sample norms: one law a row of the table of layouts and contributions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fsdpcheck import strategies
from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Case, Contribution, Numbers
from fsdpcheck.checks.clipping import assert_norms_exact, assert_probe_coefficients
from fsdpcheck.checks.loss_scaling import TIMES, assert_scaled
from fsdpcheck.checks.norm_additivity import assert_additive
from fsdpcheck.checks.refused_samples import assert_refused_alike
from fsdpcheck.checks.shape_matched_norms import assert_norms_near
from fsdpcheck.checks.training import assert_norms_in_dataset_order
from fsdpcheck.errors import NotApplicable
from fsdpcheck.judging import coverage
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import bounds
from fsdpcheck.program import probes
from fsdpcheck.strategies import low_precision, metamorphic

if TYPE_CHECKING:
    from fsdpcheck.judging.law import Draw


def _rows(contribution: Contribution, replicated: bool) -> Draw:
    def draw(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
        return strategies.cases(
            features,
            clipping=("unclipped", "probe"),
            world_sizes=world_sizes,
            contributions=(contribution,),
            replicated=replicated,
        )

    return draw


@law(
    "norms.replicated-partial",
    promise="partial-norms",
    draw=_rows("partial", replicated=True),
    observe=("norms",),
    needs_traits=("replicated",),
    must_occur=("several units",),
    vacuous_without=("several ranks",),
)
def test_partial_terms_of_a_replicated_batch_are_summed(case: Case, run: Run) -> None:
    """A replicated batch, each rank the norm of its own shard: squared norms summed over ranks, then one root.

    Without the sum each rank reports about 1/sqrt(W) of the norm.
    Not seen: whether the step clips by these norms (clipping.coefficients); what rounds, for the squares are exact.
    Source: claim A1; AReaL#312, pytorch#72548.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.replicated-complete",
    promise="private",
    draw=_rows("complete", replicated=True),
    observe=("norms",),
    needs_traits=("replicated",),
    must_occur=("several units",),
    vacuous_without=("several ranks",),
)
def test_complete_terms_of_a_replicated_batch_are_not_summed(case: Case, run: Run) -> None:
    """A replicated batch, each rank the whole norm: nothing to aggregate, and all ranks agree.

    A sum makes every norm exactly sqrt(W) too big.
    Not seen: whether the step clips by these norms (clipping.coefficients); what rounds, for the squares are exact.
    Source: claim A1; twinkle#290.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.distributed-complete",
    promise="private",
    draw=_rows("complete", replicated=False),
    observe=("norms",),
    must_occur=("ragged",),
    vacuous_without=("distributed batch on several ranks",),
)
def test_norms_of_a_distributed_batch_stay_local(case: Case, run: Run) -> None:
    """A distributed batch: each rank has the norms of its own samples, in their order; nothing is summed.

    A sum by position mixes samples, sqrt(a^2 + b^2).
    Not seen: whether the step clips by these norms (clipping.coefficients), and whether anything needless is sent.
    Source: claims A2 and A3; Opacus#761, which sums so for tensor parallelism.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "norms.dataset-order",
    promise="dataset-order",
    draw=_rows("complete", replicated=False),
    must_occur=("ragged", "wrap-around"),
    vacuous_without=("distributed batch on several ranks",),
)
def test_norms_are_reported_by_global_sample_index(case: Case, run: Run) -> None:
    """Gathered for a report, the norms of a distributed batch are in dataset order, with wrap-around duplicates listed.

    For every sampler, uneven shares and ranks without samples included.
    Not seen: whether the sizes of what is gathered tell of the batch (privacy.collectives).
    Source: claim A3; mmpretrain#173, results of several ranks in another order than the data set's.
    """
    assert_norms_in_dataset_order(run(case, probes=(probes.ordered_norms,)), run.answer(case))


@law(
    "norms.mixed",
    promise="partial-norms",
    draw=_rows("mixed", replicated=True),
    observe=("norms",),
    needs_traits=("replicated",),
    must_occur=("several units",),
    vacuous_without=("several ranks",),
)
def test_complete_terms_are_counted_once_beside_partial_ones(case: Case, run: Run) -> None:
    """Some parameters sharded, some replicated: partial terms summed, complete terms added once, before the root.

    Otherwise complete terms count W times.
    Not seen: one parameter that is partly sharded, partly replicated; whether the step clips by these norms.
    Source: pytorch#88955, DeepSpeed#5411.
    """
    assert_norms_exact(run(case), run.answer(case))


def _of_several(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    """Replicated batches, partial and mixed contributions, on numbers of ranks that can be replicas of several."""
    possible = tuple(filter(coverage.LABELS["replicated-shards"].can_be_on, world_sizes))
    return strategies.cases(
        features,
        clipping=("probe",),
        world_sizes=possible or world_sizes,
        contributions=("partial", "mixed"),
        replicated=True,
    ).map(metamorphic.in_replicas)


@law(
    "norms.one-axis",
    promise="partial-norms",
    draw=_of_several,
    observe=("norms", "grads"),
    needs_traits=("replicated", "replicated-shards", "hsdp"),
    ranks=4,
    vacuous_without=("replicated-shards",),
)
def test_partial_terms_are_summed_over_the_axis_that_splits_them(case: Case, run: Run) -> None:
    """Each replica has samples of its own, its ranks all of them: partial terms are summed over those ranks alone.

    A sum over the world mixes the samples of all replicas. What is released counts each sample once, with its own
    factor.
    Not seen: a third axis; gradients of all parameters but the probe.
    Source: the table of layouts and contributions; VeOmni#184, Opacus#761.
    """
    if case.layout.kind != "by-replica" or case.requires() - run.features.accepts:
        raise NotApplicable("the ranks are no replicas of several, or each replica's share is not accepted")
    execution, answer = run(case), run.answer(case)
    assert_norms_exact(execution, answer)
    assert_probe_coefficients(execution, answer)


def _distributed(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    """Every rank has samples of its own, and all shard the parameters."""
    flat = replace(features, accepts=features.accepts - {"hsdp"})
    return strategies.cases(
        flat, clipping=("unclipped", "probe"), world_sizes=world_sizes, contributions=("complete",), replicated=False
    ).map(partial(_contributing, contribution="partial"))


def _contributing(case: Case, contribution: Contribution) -> Case:
    return replace(case, step=replace(case.step, contribution=contribution))


@law(
    "norms.refused",
    promise="partial-norms",
    draw=_distributed,
    ranks=2,
    vacuous_without=("distributed batch on several ranks",),
)
def test_partial_terms_of_a_distributed_batch_are_refused(case: Case, run: Run) -> None:
    """Samples and elements split over the same ranks: no rank holds what is missing of any sample, so all ranks raise.

    By ValueError or NotImplementedError, before anybody waits for anybody; the same step with complete terms is taken.
    A sum, or a gather, would be numbers that mean nothing.
    Not seen: the reason: an implementation that refuses all partial terms of such a batch for another one holds.
    Source: the table of layouts and contributions; no public report known.
    """
    cause = "partial contributions are taken although the samples are split over the same ranks: nobody has the rest"
    assert_refused_alike(run(case), run(_contributing(case, "complete")), cause)


def _both(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    """One step of float64, with true functions on real numbers where they are accepted."""
    numbers: Numbers = "real" if "real" in features.accepts else "grid"
    wide = replace(features, accepts=features.accepts - {"float32"})
    found = strategies.cases(wide, clipping=("probe",), world_sizes=world_sizes, numbers=numbers)
    return found.flatmap(lambda case: st.sampled_from([_in_one_step(case, c) for c in (case.step.clip_norm, 1 << 40)]))


def _in_one_step(case: Case, clip_norm: int) -> Case:
    return replace(case, step=replace(case.step, steps=1, resume=False, clip_norm=clip_norm))


@law(
    "norms.scaling",
    promise="private",
    draw=_both,
    observe=("norms",),
    any_numbers=True,
    must_occur=("several ranks", "several units"),
)
def test_norms_grow_with_the_losses(case: Case, run: Run) -> None:
    """Losses times a power of two: norms, and the gradient where nothing is clipped, times that power, bit for bit.

    On real numbers and true functions, of layers of every kind. Sees floors, constants added to a norm, and numbers of
    few bits that underflow.
    Not seen: what is linear in the losses and wrong; numbers of few bits that keep their exponents.
    Source: jax_privacy#309, DeepSpeed#2695, claim A10.
    """
    observe = run.observe | (run.features.observables & {"grads"})
    whole, scaled = run(case, observe=observe), run(case, observe=observe, loss_times=TIMES)
    assert_scaled(whole, scaled, whole.request.clip_norm)


def _of_parameters(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    """One unclipped step, of several parameters where a bias makes them several."""
    flat = replace(features, accepts=features.accepts - {"per-layer-clipping"})
    found = strategies.cases(flat, clipping=("unclipped",), world_sizes=world_sizes)
    whole = found.map(lambda case: _in_one_step(case, case.step.clip_norm))
    return whole.map(_with_a_bias) if "bias" in features.accepts else whole


def _with_a_bias(case: Case) -> Case:
    """The case whose only layer has a bias."""
    only, *others = case.model.layers
    if others or only.kind == "rms_norm":
        return case
    return replace(case, model=replace(case.model, layers=(replace(only, bias=True),)))


@law(
    "norms.additive",
    promise="private",
    draw=_of_parameters,
    observe=("norms",),
    needs_traits=("frozen",),
    own_models=False,
    must_occur=("several ranks", "several units"),
)
def test_squared_norms_add_up_over_the_parameters(case: Case, run: Run) -> None:
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
    draw=low_precision.countable,
    observe=("norms",),
    needs_traits=("real",),
    known_layers=True,
    must_occur=("several ranks", "several units"),
)
def test_norms_of_real_numbers_are_not_below_the_true_ones(case: Case, run: Run) -> None:
    """On real numbers a reported norm is not below the sample's true one, nor above, by more than its sums may round.

    Float64; Linear, Embedding, EmbeddingBag and convolutions, in a user's own model true functions too. Sees what exact
    numbers hide: norms formed in fewer bits, Gram sums that cancel. A norm that is too small lets its sample through
    unclipped.
    Not seen: errors within the bound; float32; layers that normalise, whose roundings are not counted.
    Source: jax_privacy#309; claim E3.
    """
    assert_norms_near(run(case), run.features.factor.norm)
