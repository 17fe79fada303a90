"""The global gradient norm of plain sharded training: what is returned, and what is done with it."""

from __future__ import annotations

from functools import partial

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import assert_clipped_update, assert_global_norm
from fsdpcheck.checks.nonfinite_norms import assert_norm_not_finite
from fsdpcheck.checks.nonfinite_samples import overflowing
from fsdpcheck.checks.refused_samples import refused
from fsdpcheck.checks.training import assert_ranks_agree
from fsdpcheck.errors import NotExact
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


@law(
    "global-norm.ignored",
    promise="global-norm",
    space=GLOBAL_NORM.but(ranks=2, must_occur=("several units",), vacuous_without=("non-zero gradient",)),
    observe=("grad_norm",),
    needs_promises=("features.ignored",),
)
def test_the_norm_of_a_gradient_that_is_not_sharded_counts_once_or_is_refused(case: TrainingCase, run: Run) -> None:
    """With one parameter left out of sharding the global norm is refused, or is the single device's on every rank.

    Every rank holds the whole of that gradient: added up over ranks like the shards it would count W times.
    Not seen: more than one such parameter; the reason of what is raised.
    Source: pytorch#98281; ``clip_grad_norm_`` of PyTorch 2.13, which takes no tensors beside DTensors.
    """
    if case.mesh.dp_shard == 1:
        raise NotExact("no parameter is sharded")
    execution = run(case, using=("ignored",))
    if not refused(execution, partial(run, case)):
        assert_global_norm(execution, run.answer(case), run.features.global_norm)
        assert_ranks_agree(execution)


@law(
    "global-norm.nonfinite",
    promise="global-norm",
    space=GLOBAL_NORM.but(ranks=2, user_models="never", must_occur=("distributed batch on several ranks",)),
    observe=("grad_norm",),
)
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks(case: TrainingCase, run: Run) -> None:
    """One element of the gradient is NaN or infinite: every rank ends the step, and sees it by the norm, or raises.

    The returned norm is the same on all ranks, and NaN, infinite or negative; so are the parameters the same. Where
    ranks raise, all do. Of the sharded gradient one rank alone has the element.
    Not seen: what is done with parameters, which PyTorch's clipping makes NaN, and others leave as they were; finite
    gradients whose squares overflow.
    Source: ColossalAI#1175, where ranks that had overflowed did not join the all-reduce of the norm; pytorch#46849.
    """
    one, spoiled = overflowing(case)
    assert_norm_not_finite(run(one, spoiled=(spoiled,)), lambda: run(one), lambda: run.answer(one))
