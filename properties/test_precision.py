"""Low precision: a model that computes in bfloat16, or in TF32 on a GPU, is still the single device's.

On numbers so small that nothing rounds there (fsdpcheck/oracle/low_precision.py) the answer is the one in float64. Clip
factors that are powers of two round nothing either; where they are not, the factors themselves are judged.
A CPU computes in bfloat16, but not in TF32: there the laws on TF32 run in float32, and say that much only.
"""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import (
    assert_clipped_update,
    assert_factors,
    assert_global_norm,
    assert_norms_exact,
    assert_probe_coefficients,
)
from fsdpcheck.checks.initial_parameters import assert_starts_unrounded
from fsdpcheck.checks.noise import assert_noise_in_full_precision, noisy
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal, assert_ranks_agree
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.strategies import HIDING, LOW_PRECISION

_UNCLIPPED = LOW_PRECISION.but(clipping=("unclipped",))
_EXACT = LOW_PRECISION.but(clipping=("exact",))
_PROBE = LOW_PRECISION.but(clipping=("probe",))
_GLOBAL_NORM = LOW_PRECISION.but(global_norm=True)
_TF32 = LOW_PRECISION.but(compute="tf32")
_TF32_UNCLIPPED = _UNCLIPPED.but(compute="tf32")


@law(
    "precision.initial",
    promise="plain",
    space=LOW_PRECISION.but(must_occur=("several ranks", "several units")),
)
def test_what_is_trained_are_the_float32_parameters_that_were_given(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, every rank starts from the float32 parameters of the model, of more bits than a bfloat16.

    Sees shards that are made of the copies that the model computes with. Their values alone are not the case's:
    some 1/2 more; what is trained from there is not looked at.
    Not seen: parameters that are rounded in a step (precision.training); how they are rounded for the model.
    Source: accelerate#3979, where what was trained stayed in bfloat16; accelerate#3985 casts before it shards.
    """
    assert_starts_unrounded(run(case, probes=(probes.start_between,)))


@law(
    "precision.training",
    promise="plain",
    space=LOW_PRECISION.but(must_occur=("several ranks",), vacuous_without=("non-zero gradient",)),
)
def test_training_in_bfloat16_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, with reductions and parameters in float32, plain training is the single device's.

    Bit for bit: sees parameters or gradients kept in bfloat16.
    Not seen: how a cast rounds, for no value that is cast has more than 8 bits.
    Source: AReaL#1292, parameters and moments in bfloat16; float32 copies, Micikevicius et al. 2018, arXiv:1710.03740.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.gradients",
    promise="plain",
    space=LOW_PRECISION.but(must_occur=("several ranks", "micro-batches"), vacuous_without=("non-zero gradient",)),
    observe=("grads",),
)
def test_the_gradient_is_reduced_in_float32(case: TrainingCase, run: Run) -> None:
    """The gradient given to the optimizer is the exact sum of all micro-batches' bfloat16 gradients, in float32.

    Sees micro-batches that are added up, or gradients that are reduced, in bfloat16: sums over micro-batches and ranks
    may have more than 8 bits.
    Not seen: how one micro-batch's gradient rounds, for it has 8 bits at most.
    Source: pytorch#106395, pytorch#186998; ``reduce_dtype`` of MixedPrecisionPolicy, in which FSDPParam adds up.
    """
    assert_gradients_equal(run(case), run.answer(case))


@law(
    "precision.private",
    promise="private",
    space=_UNCLIPPED.but(must_occur=("several ranks",), vacuous_without=("non-zero gradient",)),
)
def test_private_training_in_bfloat16_is_plain_training(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16 with C above every norm, private training is single-device training, bit for bit.

    Not seen: how norms and factors are formed: an implementation that never clips holds; how a cast rounds.
    Source: Opacus#740, where a model in bfloat16 raised for its mixed dtypes.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.norms",
    promise="private",
    space=_UNCLIPPED.but(must_occur=("several ranks",), vacuous_without=("non-zero gradient",)),
    observe=("norms",),
)
def test_norms_of_bfloat16_gradients_are_summed_in_float32(case: TrainingCase, run: Run) -> None:
    """Reported norms of per-sample gradients are exact, although activations and backprops are bfloat16.

    Squares of 8 bits have 16, so they are formed and summed in float32 at least. A norm that comes out too small is
    clipped too little.
    Not seen: whether the step clips by the norms that it reports (precision.clipped).
    Source: fairscale#1092, jax_privacy#309: squared norms in half precision.
    """
    assert_norms_exact(run(case), run.answer(case))


@law(
    "precision.clipped",
    promise="exact-factors",
    space=_EXACT.but(must_occur=("several ranks", "unclipped sample"), vacuous_without=("clipped sample",)),
)
def test_clipped_training_in_bfloat16_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, with samples above, at and just below the clip norm, training is the single device's.

    Bit for bit: clip factors are powers of two, which cost no bit of a significand. Sees a step that clips by other
    factors, or by none, because it computes in bfloat16.
    Not seen: how other factors round (precision.factors); how a cast rounds.
    Source: jax_privacy#309, samples that went unclipped for their squares in half precision.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.clipped-gradients",
    promise="exact-factors",
    space=_EXACT.but(must_occur=("several ranks", "unclipped sample"), vacuous_without=("clipped sample",)),
    observe=("grads",),
)
def test_the_clipped_gradient_is_summed_in_float32(case: TrainingCase, run: Run) -> None:
    """The gradient given to the optimizer is (1/N) * sum of clipped bfloat16 gradients, in float32, bit for bit.

    Not seen: how factors that are no powers of two round (precision.bookkeeping).
    Source: fast-differential-privacy#18, where clipped gradients were summed in the model's half precision.
    """
    assert_gradients_equal(run(case), run.answer(case))


@law(
    "precision.factors",
    promise="private",
    space=_PROBE.but(must_occur=("several ranks", "unclipped sample"), vacuous_without=("clipped sample",)),
    observe=("factors",),
)
def test_factors_are_computed_in_float32(case: TrainingCase, run: Run) -> None:
    """Reported clip factors are the declared expression of the exact norms, in float32, for any C.

    Not seen: whether samples are weighed by the factors that are reported (precision.coefficients).
    Source: jax_privacy#309, factors of norms that were formed in half precision.
    """
    assert_factors(run(case), run.answer(case))


@law(
    "precision.coefficients",
    promise="private",
    space=_PROBE.without(*HIDING).but(
        must_occur=("several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
)
def test_every_sample_enters_once_with_its_clip_factor_in_bfloat16(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, a sample's coefficient in the released gradient is its clip factor over N, for any C.

    Up to two roundings to bfloat16, of 2^-9 each: a second backward through re-weighted losses makes them. Black box,
    read from the update of a probe that the model carries.
    Not seen: a factor that is itself rounded to bfloat16; gradients of all parameters but the probe.
    Source: jax_privacy#309, samples that went unclipped for their squares in half precision.
    """
    assert_probe_coefficients(run(case), run.answer(case))


@law(
    "precision.bookkeeping",
    promise="bookkeeping",
    space=_PROBE.without(*HIDING).but(
        must_occur=("several ranks", "unclipped sample"), vacuous_without=("clipped sample",)
    ),
)
def test_bookkeeping_contracts_in_float32(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, bookkeeping weighs a sample by its clip factor in float32, over N, for any C.

    Bit for bit but for averages over W that is no power of two, so a clipped gradient exceeds C by roundings of float32
    only. Black box, as above. Sees factors, products or sums that are rounded to bfloat16.
    Not seen: gradients of all parameters but the probe.
    Source: arXiv:2210.00038; fast-differential-privacy#18, where clipped gradients were summed in half precision.
    """
    assert_probe_coefficients(run(case), run.answer(case), contracted=True)


@law(
    "precision.noise",
    promise="noise",
    space=_UNCLIPPED.but(must_occur=("several ranks",)),
    observe=("grads",),
)
def test_noise_is_added_in_float32(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, every parameter's gradient has noise, of more bits than a bfloat16, the same on all ranks.

    So it is drawn and added in float32. Right noise is called wrong with probability 1e-6 at most.
    Not seen: scale and dependence (chapter on noise); noise of 9 bits or more that is not all of float32; later steps.
    Source: opendp#414, Opacus#616, on what the bits of a noisy sum tell; Mironov 2012, doi:10.1145/2382196.2382264.
    """
    noisy_case = noisy(case, 1)
    assert_noise_in_full_precision(run(noisy_case), run.answer(noisy_case))


@law(
    "precision.global-norm",
    promise="global-norm",
    space=_GLOBAL_NORM.but(must_occur=("several ranks",), vacuous_without=("non-zero gradient",)),
    observe=("grad_norm",),
)
def test_the_global_norm_is_that_of_the_reduced_gradient_in_float32(case: TrainingCase, run: Run) -> None:
    """Computing in bfloat16, the norm of the gradient that was reduced in float32 is returned, and clips the update.

    The norm within the bound of its declared nesting, the update bit for bit by what was returned.
    Not seen: errors of the norm within that bound; how a cast rounds.
    Source: pytorch#90028, torchtitan#4135.
    """
    execution, answer = run(case), run.answer(case)
    assert_global_norm(execution, answer, run.features.global_norm)
    assert_ranks_agree(execution)
    assert_clipped_update(execution, answer, run.features.global_norm)


@law(
    "precision.tf32-training",
    promise="plain",
    space=_TF32.but(must_occur=("several ranks",), vacuous_without=("non-zero gradient",)),
)
def test_training_in_tf32_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """Where products of matrices may round their factors to TF32, plain training is the single device's, bit for bit.

    Only a GPU rounds so: elsewhere this is training in float32.
    Not seen: how the model's own products round, for their factors fit TF32.
    Source: pytorch#53635, products that round; no public report known of a gradient that did on its way.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.tf32-norms",
    promise="private",
    space=_TF32_UNCLIPPED.but(must_occur=("several ranks",), vacuous_without=("non-zero gradient",)),
    observe=("norms",),
)
def test_norms_in_tf32_are_the_per_sample_gradient_norms(case: TrainingCase, run: Run) -> None:
    """Where products of matrices may round their factors to TF32, norms are exact: nothing squared is such a factor.

    Only a GPU rounds so: elsewhere these are norms in float32.
    Not seen: how the model's own products round, for their factors fit TF32; whether the step clips by these norms.
    Source: pytorch#53635, products that round; no public report known of a norm that did.
    """
    assert_norms_exact(run(case), run.answer(case))
