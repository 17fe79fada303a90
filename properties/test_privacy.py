"""Privacy: what one record can move. Everything here is conditional on which records each rank has at a step.

Neighbours are two lists of indices (see strategies/neighbours.py). Noise is off where sums are bounded: it has to hide
them. Frozen and tied parameters are among the cases, and ones left out of sharding have a law of their own. Not judged:
the sampler, whose law is its own.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from tempfile import TemporaryDirectory

from fsdpcheck.case import SamplerCase, TrainingCase
from fsdpcheck.checks import distinguishing
from fsdpcheck.checks.accounting import assert_accounted, assert_same_public
from fsdpcheck.checks.neighbour_releases import assert_replayed, releases_of
from fsdpcheck.checks.noise import noisy, standing
from fsdpcheck.checks.privacy import (
    assert_others_keep_their_coefficient,
    assert_same_calls,
    assert_same_noise,
    assert_sensitivity,
)
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.processes import leftovers
from fsdpcheck.strategies import PRIVATE, PRIVATE_PROBE, BuiltSpace, SamplerSpace, neighbours

_CLIPPED = PRIVATE_PROBE.but(contributions=("complete",), by_unit=(False, True, True))
"""Only "probe": in the family "exact" what the instrument sees of a record depends on the others in its batch.

Two in three of the models that have units clip them apart, where that is accepted.
"""
_WIDE = PRIVATE_PROBE.without("float32").but(contributions=("complete",), tiny_only=True)
"""Small, in float64, where a sum shows at least 40 bits of the noise in it."""

_LONG = _CLIPPED.but(steps=(3, 3, 4))
_CANARY = BuiltSpace(
    build=distinguishing.trials, words="small models on few ranks and on many, with a canary", user_models="never"
)


def _one_step(case: TrainingCase) -> TrainingCase:
    return replace(case, step=case.step.of_steps(1))


@law(
    "privacy.sensitivity",
    promise="private",
    space=_CLIPPED.but(
        must_occur=("distributed batch on several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
    observe=("grads",),
    climbs=True,
)
def test_one_record_moves_the_released_sum_by_at_most_the_clip_norm(case: TrainingCase, run: Run) -> None:
    """For given lists, a record removed or added moves N * the released gradient by at most C, k copies by k C.

    One replaced moves it by 2C. From the profile ci on cases are sought that come near that, and what was reached is
    reported. Lists are what a sampler drew: one that partitions is judged conditional on them. Where
    groups of parameters are clipped apart, C is the root of the sum of their C_l^2. Decided in exact arithmetic, over
    all parameters together, with room for proven rounding only.
    Not seen: a sum that is too small; neighbours other than the pair that is drawn.
    Source: TF-Privacy#81, Opacus#751, pytorch#25162; DP-SGD, arXiv:1607.00133; per layer, arXiv:1812.06210.
    """
    pair = neighbours.of(_one_step(case), run.features)
    one, two = run(pair.first), run(pair.second)
    reached = assert_sensitivity(pair, (one, run.answer(pair.first)), (two, run.answer(pair.second)))
    run.ran.reach(pair.relation, reached)


@law(
    "privacy.ignored",
    promise="features.ignored",
    space=_CLIPPED.but(
        must_occur=("distributed batch on several ranks", "unclipped sample"),
        vacuous_without=("several ranks", "clipped sample"),
    ),
    observe=("grads",),
    needs_promises=("private",),
)
def test_one_record_moves_no_more_where_a_parameter_is_left_out_of_sharding(case: TrainingCase, run: Run) -> None:
    """With one parameter left out of sharding a record still moves N * the released gradient by at most k C.

    That parameter counts in the norms and in the sum like the others. For given lists, as in privacy.sensitivity.
    Not seen: a sum that is too small (features.ignored); more than one such parameter.
    Source: pytorch#98281, where nobody answered for the gradients of ignored parameters; DP-SGD, arXiv:1607.00133.
    """
    pair = neighbours.of(_one_step(case), run.features)
    one, two = (run(side, using=("ignored",)) for side in (pair.first, pair.second))
    assert_sensitivity(pair, (one, run.answer(pair.first)), (two, run.answer(pair.second)))


@law(
    "privacy.replayed",
    promise="private",
    space=_LONG.but(must_occur=("distributed batch on several ranks",), vacuous_without=("clipped sample",)),
    observe=("grads",),
    needs_traits=("project",),
)
def test_whatever_was_released_a_further_step_moves_by_at_most_the_clip_norm(case: TrainingCase, run: Run) -> None:
    """Given the releases of its neighbour, each further step of a training moves by at most k C, and decides alike.

    For given lists, over three steps or more: the optimizer of the second training is given the gradients of the first.
    Then N times its own are at most k C away at each step, 2C where a record is replaced, and bit for bit the same are
    what other records weigh, whether the optimizer is called, its learning rate and other options, and the parameters.
    So is what composition asks for: clip norms, rates and stops follow from what was released. What is decided on a
    release before the optimizer is called counts as decided on records.
    Not seen: a clip norm that follows from factors' own rounding, where these are nested; steps after the sixth.
    Source: Opacus#779, whose clip norm follows the batch; DP-SGD, arXiv:1607.00133.
    """
    pair = neighbours.of(replace(case, step=replace(case.step, resume=False)), run.features)
    one = run(pair.first, releases=())
    two = run(pair.second, releases=releases_of(one))
    sides = (one, run.answer(pair.first)), (two, run.answer(pair.second, forced=pair.first))
    assert_replayed(pair, *sides, coefficients="exact-factors" in run.features.promises)


@law(
    "privacy.independence",
    promise="exact-factors",
    space=_CLIPPED.but(must_occur=("distributed batch on several ranks",), vacuous_without=("clipped sample",)),
    observe=("grads",),
)
def test_a_record_weighs_the_same_whatever_the_others_are(case: TrainingCase, run: Run) -> None:
    """The coefficient of a record in the released gradient does not depend on which other records are in the batch.

    So clip norm, divisor and weights are functions of the record and of public numbers, bit for bit.
    Not seen: a coefficient that is wrong alike for both neighbours; gradients of all parameters but the probe.
    Source: Opacus#779, Opacus#280, nousnet#274.
    """
    pair = neighbours.of(_one_step(case), run.features)
    one, two = run(pair.first), run(pair.second)
    assert_others_keep_their_coefficient(pair, (one, run.answer(pair.first)), (two, run.answer(pair.second)))


@law(
    "privacy.noise",
    promise="noise",
    space=_WIDE.but(must_occur=("distributed batch on several ranks",)),
    observe=("grads",),
    needs_traits=("project",),
)
def test_no_noise_depends_on_a_record(case: TrainingCase, run: Run) -> None:
    """The noise of every parameter at every step is the same for neighbours: neither draws nor their scale or number.

    Noise is what a noisy run releases beyond one without, up to what adding it may round, in two steps that move no
    parameter, so that a count of what was drawn shows in the second.
    Not seen: what shows after more than two steps; whether there is any noise (noise.once).
    Source: TF-Privacy#153.
    """
    pair = neighbours.of(standing(noisy(case), 2), run.features)
    sides = (pair.first, pair.second)
    clean = [replace(side, step=replace(side.step, noise_multiplier=0.0)) for side in sides]
    one, two = ((run(side), run(quiet), run.answer(side)) for side, quiet in zip(sides, clean, strict=True))
    assert_same_noise(pair, one, two)


@law(
    "privacy.collectives",
    promise="private",
    space=PRIVATE.but(
        contributions=("complete",), ranks=2, must_occur=("distributed batch on several ranks", "micro-batches")
    ),
)
def test_no_collective_depends_on_a_record(case: TrainingCase, run: Run) -> None:
    """Number of steps, and number, order, groups, types and sizes of all collectives, are the same for neighbours.

    Only tensors that stay on their rank may have as many rows as it has samples.
    Not seen: when anything is sent; norms of a replicated batch that are put together from shares, which travel as one
    number a sample and are not drawn here.
    Source: Opacus#516, Opacus#812.
    """
    pair = neighbours.of(case, run.features)
    assert_same_calls(pair, run(pair.first), run(pair.second))


@law(
    "privacy.canary",
    promise="noise",
    space=_CANARY,
    needs_traits=("project", "ragged"),
)
def test_trainings_with_a_canary_and_without_are_not_told_apart(case: TrainingCase, run: Run) -> None:
    """Nobody tells from the parameters after each step, better than the noise allows, if a training had one record.

    Judged from outside: trainings of two steps with a record whose targets are 2^20, and without it, each with noise of
    its own. An adversary that is taught by 48 of them says of 96 others which they are, or of as many as decide. What
    it may get right follows from noise multiplier and steps alone: honest trainings are called wrong with probability
    1e-6 at most. Most noise that is a sixth of what it should be is found, and most records that weigh six times as
    much.
    Not seen: errors of less than a factor of three; what only another record, or more steps, would show; whether
    trainings that are not asked for come to their end.
    Source: Opacus#161, TF-Privacy#153; Dong, Roth, Su 2019, arXiv:1905.02383.
    """
    spoiled, other = distinguishing.canaries(case), distinguishing.without_canary(case)
    distinguishing.assert_not_told_apart(
        case,
        (
            (run(case, noise_seed=2 * k, spoiled=spoiled, given_for=case), run(other, noise_seed=2 * k + 1))
            for k in itertools.count()
        ),
    )


@law(
    "privacy.accounted",
    promise="accounted",
    space=PRIVATE.but(steps=(2, 2, 3), must_occur=("several ranks", "micro-batches")),
    observe=("accounted",),
)
def test_an_accountant_is_told_what_ran(case: TrainingCase, run: Run) -> None:
    """After every step an accountant has been told of all steps so far: noise multiplier and rate of each, once.

    Over any number of ranks and of micro-batches; where checkpoints are promised, also by trainers that take a step
    each and go on from what the last one saved. The rate is Setup.rate.
    Not seen: what the accountant makes of it; whether noise has that multiplier (noise.scale), or draws that rate
    (samplers.poisson-rate).
    Source: Opacus#757, Opacus#429, Opacus#813.
    """
    noise = noisy(case)
    rate = 1 / (2 << case.seed % 8)
    assert_accounted(run(noise, rate=rate))
    if "state" in run.features.promises:
        with TemporaryDirectory(prefix=leftovers.folder_prefix()) as folder:
            assert_accounted(run(noise, rate=rate, save_to=folder, load_from=folder))


@law(
    "privacy.engine",
    promise="engine",
    space=SamplerSpace(kind="poisson", must_occur=("several ranks",)),
)
def test_nothing_that_is_public_follows_from_the_size_of_the_data_set(case: SamplerCase, run: Run) -> None:
    """Built on a data set with a record less, a training has the same divisor, steps, rate, learning rate and all else.

    All that shows to who sees no record, by the adapter's own account. Neighbours by removal differ in size, so
    whatever is counted off a data set is part of what is released.
    Not seen: what the adapter does not tell of; sizes that differ by more than one.
    Source: Opacus#813, whose rate comes of the number of batches; jax_privacy#338.
    """
    size = case.sampling.records + 1
    case = replace(case, sampling=replace(case.sampling, records=size))
    assert_same_public(run(case, records=size), run(case, records=size - 1))
