"""Deferred norms: computed after the first backward instead of inside its hooks."""

from __future__ import annotations

from dataclasses import replace

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.training import assert_completed, assert_deferred_equals_immediate
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import PRIVATE

_DEFERRED = PRIVATE.but(norms=("deferred",))


@law(
    "deferred.equals-immediate",
    promise="deferred",
    space=_DEFERRED.but(
        must_occur=("distributed batch on several ranks", "several units"), vacuous_without=("non-zero gradient",)
    ),
    observe=("grads", "norms", "factors"),
)
def test_deferred_norms_are_the_immediate_ones(case: TrainingCase, run: Run) -> None:
    """Deferred and immediate norms give the same norms, factors, gradients and parameters, bit for bit.

    Not seen: what both do wrong alike, and whether any norm is deferred: an implementation that forms all at once
    holds.
    Source: claims C2 and C5; no public report known.
    """
    immediate = replace(case, step=replace(case.step, norms="immediate"))
    assert_deferred_equals_immediate(run(case), run(immediate))


@law(
    "deferred.completes",
    promise="deferred",
    space=_DEFERRED.but(
        must_occur=(
            *("distributed batch on several ranks", "ragged", "empty-rank", "micro-batches"),
            "forward without samples beside other shards",
        )
    ),
)
def test_deferred_norms_never_hang(case: TrainingCase, run: Run) -> None:
    """With unequal batches, ranks without samples, and gradient sync off in the first backward, every rank finishes.

    In the order of ranks and in the opposite one.
    Not seen: whether these two stand for all orders: they do where ranks are deterministic and joined by blocking
    collectives alone, which is not judged here (``Execution.voids``).
    Source: claims C1 and C6; Opacus' empty Poisson batches, Opacus#164.
    """
    for schedule in ("forward", "reversed"):
        assert_completed(run(case, schedule=schedule))
