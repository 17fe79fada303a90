"""Kernels that compute per-sample squared norms, against the definition; those in Triton are interpreted.

Every kernel of the adapter runs in a process of its own, on tensors and workspaces that lie in NaN.
"""

from __future__ import annotations

from fsdpcheck.case import KernelCase
from fsdpcheck.checks.kernels import (
    assert_definition,
    assert_memory_kept,
    assert_same_bits,
    assert_spoiled,
    assert_within_bound,
)
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import KernelSpace

_INTEGERS = KernelSpace()
_POISONED = KernelSpace(poisoned=("nan", "inf"))
_REAL = KernelSpace(numbers="real")
_REPEATED = KernelSpace(numbers="real", repeated=True)


@law("kernels.definition", promise="kernels", space=_INTEGERS.but(must_occur=("several samples",)))
def test_norms_are_those_of_the_definition(case: KernelCase, run: Run) -> None:
    """On integers, scaled by powers of two, every norm is the definition's, bit for bit.

    For every remainder of the tile sizes, any strides and dtypes, no sample or several.
    Not seen: what rounds (kernels.bounded).
    Source: jax_privacy#309 (squares that vanish in half precision), Opacus#751.
    """
    assert_definition(run(case))


@law("kernels.bounded", promise="kernels", space=_REAL.but(must_occur=("several samples",)))
def test_norms_are_not_under_estimated(case: KernelCase, run: Run) -> None:
    """On real numbers that nearly cancel, norms are within the bound of float32 sums, so never further below.

    A norm that is too small leaves its sample clipped too little.
    Not seen: errors within the bound, which for sums that cancel are large beside the norm itself.
    Source: jax_privacy#309, fairscale#1092 (norms that were summed in half precision).
    """
    assert_within_bound(run(case))


@law("kernels.order", promise="kernels", space=_REPEATED.but(must_occur=("several samples",)))
def test_equal_inputs_give_equal_bits(case: KernelCase, run: Run) -> None:
    """Called twice, or with the programs of a launch in the opposite order, a kernel gives the same bits.

    So ranks that hold one sample agree on its clip factor.
    Not seen: orders inside a program, which only a GPU has.
    Source: Megatron-LM#657, sums in the order in which atomics come.
    """
    assert_same_bits(run(case))


@law("kernels.memory", promise="kernels", space=_INTEGERS.but(must_occur=("several samples",)))
def test_kernels_keep_to_their_own_memory(case: KernelCase, run: Run) -> None:
    """A kernel writes to nothing but what it allocated, and reads neither beside its inputs nor what nobody wrote.

    Not seen: what is further than 64 elements away.
    Source: Megatron-LM#5788, pytorch#116122.
    """
    assert_memory_kept(run(case))


@law("kernels.spoiled", promise="kernels", space=_POISONED.but(vacuous_without=("several samples",)))
def test_a_spoiled_sample_is_seen_and_spoils_no_other(case: KernelCase, run: Run) -> None:
    """A sample with a NaN has norm NaN, one with an infinity no finite norm, and all others have their own, exactly.

    Not seen: a norm that overflows although all inputs are finite.
    Source: DeepSpeed#7171, habitat-lab#2226, pytorch#46849.
    """
    assert_spoiled(execution := run(case))
    assert_definition(execution)
