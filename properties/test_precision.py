"""Low precision: a model that computes in bfloat16, or in TF32 on a GPU, is still the single device's.

On numbers so small that nothing rounds there (fsdpcheck/low_precision.py) the answer is the one in float64.
A CPU computes in bfloat16, but not in TF32: there the laws on TF32 run in float32, and say that much only.
"""

from __future__ import annotations

from functools import partial

from fsdpcheck.case import Case
from fsdpcheck.checks import assert_gradients_equal, assert_norms_exact, assert_parameters_equal
from fsdpcheck.law import law
from fsdpcheck.runner import Run
from fsdpcheck.strategies import narrow as strategies_narrow

_unclipped = partial(strategies_narrow.low_precision, clipping="unclipped")
_tf32 = partial(strategies_narrow.low_precision, compute="tf32")
_tf32_unclipped = partial(strategies_narrow.low_precision, clipping="unclipped", compute="tf32")


@law(
    "precision.training",
    promise="plain",
    draw=strategies_narrow.low_precision,
    needs_traits=("bfloat16",),
    own_models=False,
)
def test_training_in_bfloat16_is_the_single_device_one(case: Case, run: Run) -> None:
    """Computing in bfloat16, with reductions and parameters in float32, plain training is the single device's.

    Bit for bit: sees parameters or gradients kept in bfloat16. Does not see how a cast rounds, for no value that is
    cast has more than 8 bits. Source: Micikevicius et al. 2018, arXiv:1710.03740 (float32 copies of parameters).
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.gradients",
    promise="plain",
    draw=strategies_narrow.low_precision,
    observe=("grads",),
    needs_traits=("bfloat16",),
    own_models=False,
)
def test_the_gradient_is_reduced_in_float32(case: Case, run: Run) -> None:
    """The gradient given to the optimizer is the exact sum of the ranks' bfloat16 gradients, over W, in float32.

    Sees a reduction in bfloat16: the sum over ranks may have more than 8 bits. Source: MixedPrecisionPolicy of
    fully_shard (reduce_dtype).
    """
    assert_gradients_equal(run(case), run.answer(case))


@law("precision.private", promise="private", draw=_unclipped, needs_traits=("bfloat16",), own_models=False)
def test_private_training_in_bfloat16_is_plain_training(case: Case, run: Run) -> None:
    """Computing in bfloat16 with C above every norm, private training is single-device training, bit for bit."""
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.norms",
    promise="private",
    draw=_unclipped,
    observe=("norms",),
    needs_traits=("bfloat16",),
    own_models=False,
)
def test_norms_of_bfloat16_gradients_are_summed_in_float32(case: Case, run: Run) -> None:
    """Reported norms of per-sample gradients are exact, although activations and backprops are bfloat16.

    Squares of 8 bits have 16, so they are formed and summed in float32 at least. A norm that comes out too small is
    clipped too little.
    """
    assert_norms_exact(run(case), run.answer(case))


@law("precision.tf32-training", promise="plain", draw=_tf32, needs_traits=("tf32",), own_models=False)
def test_training_in_tf32_is_the_single_device_one(case: Case, run: Run) -> None:
    """Where products of matrices may round their factors to TF32, plain training is the single device's, bit for bit.

    Only a GPU rounds so: elsewhere this is training in float32.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "precision.tf32-norms",
    promise="private",
    draw=_tf32_unclipped,
    observe=("norms",),
    needs_traits=("tf32",),
    own_models=False,
)
def test_norms_in_tf32_are_the_per_sample_gradient_norms(case: Case, run: Run) -> None:
    """Where products of matrices may round their factors to TF32, norms are exact: nothing squared is such a factor.

    Only a GPU rounds so: elsewhere these are norms in float32.
    """
    assert_norms_exact(run(case), run.answer(case))
