"""The global gradient norm of plain sharded training: what is returned, and what is done with it."""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import assert_clipped_update, assert_global_norm
from fsdpcheck.checks.training import assert_ranks_agree
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import GLOBAL_NORM


@law(
    "global-norm.returned",
    promise="global-norm",
    space=GLOBAL_NORM.but(
        must_occur=("distributed batch on several ranks", "several units"), vacuous_without=("non-zero gradient",)
    ),
    observe=("grad_norm",),
)
def test_the_returned_norm_is_that_of_the_whole_gradient(case: TrainingCase, run: Run) -> None:
    """The returned global gradient norm is the single device's, on every rank.

    Within the bound that follows from the declared nesting of roots and dtype. Returned values are part of the
    contract.
    Not seen: what is done with the norm (global-norm.update); other norms than the Euclidean one.
    Source: pytorch#72548, VeOmni#184, torchtitan#766, miles_diffusion#35.
    """
    execution = run(case)
    assert_global_norm(execution, run.answer(case), run.features.global_norm)
    assert_ranks_agree(execution)


@law(
    "global-norm.update",
    promise="global-norm",
    space=GLOBAL_NORM.but(
        must_occur=("distributed batch on several ranks", "several units"),
        vacuous_without=("clipped by the global norm",),
    ),
    observe=("grad_norm",),
)
def test_the_update_is_that_of_the_clipped_gradient(case: TrainingCase, run: Run) -> None:
    """The update is the optimizer's for gradient * min(1, C / (returned norm + eps)), bit for bit.

    Not seen: a norm that is wrong alike on all ranks, for the returned one is taken as it is (global-norm.returned).
    Source: SpecForge#663, which logged the global norm and clipped each shard by its own.
    """
    assert_clipped_update(run(case), run.answer(case), run.features.global_norm)
