"""Noise: once on every real element, the same on all ranks and for every layout, of the right scale, never again.

Decided structurally where it can be: noise is what a noisy run releases beyond the same run without noise.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks import noise as noise_checks
from fsdpcheck.checks.invariance import assert_same_training
from fsdpcheck.checks.noise import assert_noise_once, noisy
from fsdpcheck.checks.noise_distribution import assert_noise_independent, assert_noise_scale, large
from fsdpcheck.checks.training import assert_padding_zero
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.strategies import PRIVATE_EXACT, BuiltSpace, metamorphic

_NOISY = PRIVATE_EXACT.but(adjusted=("secure at times",))
_WIDE = _NOISY.without("float32")
"""In float64, where a sum shows at least 40 bits of the noise in it."""
_LARGE = BuiltSpace(build=large, words="parameters of all sizes, whose noise needs no other run", user_models="never")


def _same(pair: metamorphic.Pair, run: Run, what: str) -> None:
    first, second = pair
    assert_same_training((run(first), run.answer(first)), (run(second), run.answer(second)), what)


@law(
    "noise.world",
    promise="noise-of-seed",
    space=_NOISY.but(must_occur=("several ranks", "hsdp", "secure-noise")),
    observe=("grads",),
    takes=2,
)
def test_noise_is_the_same_on_any_number_of_ranks(case: TrainingCase, run: Run) -> None:
    """The same seed, batch and step on another number of ranks, or of replicas, release the same noisy gradient.

    Bit for bit. So no rank's share of the noise depends on which share it is. One step.
    Not seen: noise that is wrong on any number of ranks alike: too small, or used twice (noise.scale, noise.once).
    Source: Opacus#761, Opacus#166.
    """
    _same(metamorphic.at_another_world_size(noisy(case, 1), run.features), run, "noise depends on the number of ranks")


@law(
    "noise.micro-batches",
    promise="noise-of-seed",
    space=_NOISY.but(must_occur=("distributed batch on several ranks",)),
    observe=("grads",),
    needs_traits=("micro-batches",),
)
def test_noise_is_added_once_however_many_micro_batches(case: TrainingCase, run: Run) -> None:
    """One micro-batch or several, reduced after each or after the last, release the same noisy gradient, bit for bit.

    Not seen: noise that is wrong whatever their number: too small, or used twice (noise.scale, noise.once).
    Source: optax#527.
    """
    pair = metamorphic.with_other_micro_batches(noisy(case, 1), run.features)
    _same(pair, run, "noise depends on the number of micro-batches")


@law(
    "noise.once",
    promise="noise",
    space=_WIDE.but(must_occur=("several ranks", "several units", "frozen", "secure-noise")),
    observe=("grads",),
    needs_traits=("project",),
)
def test_every_element_has_noise_of_its_own(case: TrainingCase, run: Run) -> None:
    """Every element of every trained parameter has noise at every step, equal on all ranks, and no draw is used twice.

    Nor is one used again with its sign turned; over elements, shards, parameters and steps, also for parameters no
    sample reaches. Frozen parameters have none.
    Not seen: scale and distribution (noise.scale), and draws that are correlated but not equal (noise.independent).
    Source: Opacus#161, Opacus#761, jax#3646, mlcommons/training#844.
    """
    clean = noise_checks.standing(noisy(case))
    clean = replace(clean, step=replace(clean.step, noise_multiplier=0.0))
    assert_noise_once(run(noisy(clean)), run(clean))


@law(
    "noise.ignored",
    promise="noise",
    space=_WIDE.but(must_occur=("frozen",), vacuous_without=("several ranks",)),
    observe=("grads",),
    needs_traits=("project",),
    needs_promises=("features.ignored",),
)
def test_a_parameter_that_is_not_sharded_has_noise_of_its_own(case: TrainingCase, run: Run) -> None:
    """With one parameter left out of sharding its noise too is of its own in every element, and equal on all ranks.

    Every rank holds the whole parameter, so each has to draw what the others draw, or copies part; as noise.once.
    Not seen: scale and distribution (noise.scale); more than one such parameter.
    Source: Opacus#761; pytorch#98281, where nobody answered for the gradients of ignored parameters.
    """
    clean = noise_checks.standing(noisy(case))
    clean = replace(clean, step=replace(clean.step, noise_multiplier=0.0))
    assert_noise_once(run(noisy(clean), using=("ignored",)), run(clean, using=("ignored",)))


@law(
    "noise.padding",
    promise="noise",
    space=_NOISY.but(ranks=2, must_occur=("several units",)),
    observe=("shards",),
)
def test_padding_has_no_noise(case: TrainingCase, run: Run) -> None:
    """Padding stays zero under noise, in parameters and gradients: norms and moments of it would be wrong for ever.

    The moments after_reduce and before_step must be announced.
    Not seen: padding that the adapter does not show; moments between those that it announces.
    Source: pytorch#121509, padding that was not zero; no public report known of noise on it.
    """
    assert_padding_zero(run(noisy(case), probes=(probes.padding,)))


@law(
    "noise.scale",
    promise="noise",
    space=_LARGE.but(must_occur=("several ranks", "secure-noise")),
    observe=("grads",),
)
def test_the_noise_has_the_scale_that_was_asked_for(case: TrainingCase, run: Run) -> None:
    """Beyond its clipped sum a step releases Gaussians of standard deviation noise multiplier * C / N, in every step.

    In parameters of 384,000 elements and fewer. Right noise is called wrong with probability 1e-6 at most. Of the
    largest parameter 1 % off in scale at any step is found with probability 0.99, of 60 elements a tenth of the scale,
    of all another distribution. Draws are seeded. Where groups are clipped apart, C is the root of the sum of their
    C_l^2.
    Not seen: draws that depend on one another (noise.independent); steps after the second.
    Source: Opacus#530, jax_privacy#383, TF-Privacy#153, fedbiomed#1443; per layer, arXiv:1812.06210.
    """
    assert_noise_scale(run(case), run.answer(case))


@law(
    "noise.independent",
    promise="noise",
    space=_LARGE.but(must_occur=("several ranks", "secure-noise")),
    observe=("grads",),
)
def test_no_noise_tells_of_other_noise(case: TrainingCase, run: Run) -> None:
    """Noise of different steps, parameters, shards, rows and elements is not correlated, whatever its scale.

    Right noise is called wrong with probability 1e-6 at most; a correlation of 2 % between two steps of 384,000
    elements, or of 4 % between two shards of five, is found with probability 0.99.
    Not seen: dependence without correlation, or between other pairs of elements than those of one place.
    Source: Opacus#761, jax#3646.
    """
    assert_noise_independent(run(case), run.answer(case))
