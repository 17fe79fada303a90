"""Lifecycle: what is alive at the moments that an implementation announces, and what a step leaves behind.

Seen are memory and gradients that units hold then. Not seen: what is alive between two moments, such as the second unit
that is gathered ahead while one computes.
"""

from __future__ import annotations

from hypothesis.strategies import SearchStrategy

from fsdpcheck import observers, strategies
from fsdpcheck.adapters._base import Features
from fsdpcheck.case import Case, Clipping
from fsdpcheck.law import law
from fsdpcheck.lifecycle_checks import assert_aliased, assert_few_gathered, assert_released
from fsdpcheck.runner import Run


def _any(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    """Plain steps, and private ones, with one backward or two."""
    families: tuple[Clipping, ...] = ("none", "unclipped") if "private" in features.promises else ("none",)
    return strategies.cases(features, clipping=families, world_sizes=world_sizes)


def _alone(features: Features, world_sizes: tuple[int, ...]) -> SearchStrategy[Case]:
    """On one rank, whatever numbers are asked for: the law speaks of no other."""
    return _any(features, (1,))


@law("lifecycle.gathered", promise="lifecycle", draw=_any, observe=("units",), ranks=2)
def test_the_root_and_one_inner_unit_at_most_are_gathered(case: Case, run: Run) -> None:
    """At every announced moment at most one inner unit holds gathered parameters, beside the root.

    Where parameters are to be kept after the forward, each inner unit may hold its own until the backward is over.
    Source: pytorch#83129.
    """
    assert_few_gathered(run(case, observers=(observers.UNITS,)))


@law("lifecycle.released", promise="lifecycle", draw=_any, observe=("units",))
def test_a_step_leaves_nothing_gathered_and_no_local_gradient(case: Case, run: Run) -> None:
    """After a step no unit holds gathered parameters or an unreduced gradient; before the first one neither.

    Zeros in place of a gradient are memory too. Source: pytorch#83129, pytorch#92731.
    """
    assert_released(run(case, observers=(observers.UNITS,)))


@law("lifecycle.aliased", promise="lifecycle", draw=_alone, observe=("units",))
def test_on_one_rank_the_shard_is_the_whole(case: Case, run: Run) -> None:
    """With one rank the shard and the unsharded parameters are one memory, at every moment: nothing is held twice.

    Also with frozen parameters and either number of backwards. Source: FlatParameter of FSDP, arXiv:2304.11277.
    """
    assert_aliased(run(case, observers=(observers.UNITS,)))
