"""Checks of norm kernels against the definition: ||sum_t g_t a_t^T||_F^2 of each sample, in exact arithmetic.

Legend: B samples, T positions, d input and p output features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from fsdpcheck.case import KernelCase, KernelSpec
from fsdpcheck.checks._compare import number
from fsdpcheck.checks._read import completed
from fsdpcheck.diagnosis import norm_kernels
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program import kernel_data
from fsdpcheck.program.kernels import KERNEL, Computed

_UNIT = Fraction(1, 1 << 24)
"""Unit roundoff of float32: kernels that accumulate in float64 round less."""
_EXACT = 1 << 24
"""Integers up to here, and all their sums that stay below, are exact in float32."""


def case_of(execution: Execution) -> KernelCase:
    """What the kernels were given. Raises UsageError for a case of something else."""
    case = execution.request.case
    if not isinstance(case, KernelCase):
        raise UsageError("the run was not one of kernels; next: give it a KernelCase")
    return case


def spec_of(execution: Execution) -> KernelSpec:
    """The same without its seed."""
    return case_of(execution).kernel


def computed(execution: Execution) -> Iterator[tuple[str, Computed]]:
    """(name of a kernel, what it gave). Raises Violation with the failure's report if one raised."""
    found = [(name, value) for who, name, _, value in completed(execution)[0].observations if who == KERNEL]
    if not found:
        raise UsageError("the adapter has no kernels; next: name some in Kernels.kernels()")
    yield from found


def assert_definition(execution: Execution) -> None:
    """Every kernel gives every sample's norm exactly; a spoiled sample is left out. Raises NotExact beyond 24 bits."""
    spec = spec_of(execution)
    wanted, bound = kernel_data.exact(spec, case_of(execution).seed)
    unit = Fraction(2) ** (2 * sum(spec.exponents))
    if any(value > _EXACT * unit for value in bound):
        raise NotExact(f"sums of absolute values reach {max(bound) / unit}, beyond {_EXACT}")
    spoiled = _spoiled(execution)
    for name, got in computed(execution):
        _require_samples(name, got.once, len(wanted))
        for sample, (value, right) in enumerate(zip(got.once.tolist(), wanted, strict=True)):
            if sample != spoiled and value != float(right):
                what = "a norm is not the definition's" if spoiled is None else "a sample is spoiled by another one"
                cause = partial(norm_kernels.of_squared_norm, case_of(execution), sample, value, right, Fraction(0))
                raise Violation(what, got=repr(value), wanted=repr(float(right)), where=_where(name, sample, spec),
                                cause=cause)  # fmt: skip


def assert_within_bound(execution: Execution) -> None:
    """On real numbers every norm is within gamma_n * H of the exact one, so never further below it either.

    H = ||sum_t |g_t| |a_t|^T||_F^2, n the most roundings that a term passes in the direct or the Gram form, in any
    order of summation, and gamma_n = n u / (1 - n u) for float32. Every term of the norm is multiplied by at most n
    factors within 1 +- u. Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1.
    """
    spec = spec_of(execution)
    n = kernel_data.roundings(spec) * _UNIT
    wanted, sums = kernel_data.exact(spec, case_of(execution).seed)
    for name, got in computed(execution):
        _require_samples(name, got.once, len(wanted))
        for sample, (value, right, size) in enumerate(zip(got.once.tolist(), wanted, sums, strict=True)):
            bound = n / (1 - n) * size
            if not math.isfinite(value) or abs(Fraction(value) - right) > bound:
                low = math.isfinite(value) and Fraction(value) < right
                what = "a norm is under-estimated: its sample is clipped too little" if low else "a norm is wrong"
                cause = partial(norm_kernels.of_squared_norm, case_of(execution), sample, value, right, bound)
                raise Violation(what, got=repr(value), wanted=f"{float(right)!r} within {float(bound):.3g}",
                                where=_where(name, sample, spec), cause=cause)  # fmt: skip


def assert_same_bits(execution: Execution) -> None:
    """A kernel gives the same bits twice, and when the programs of each launch run in the opposite order."""
    spec = spec_of(execution)
    for name, got in computed(execution):
        ways = (("the same call", got.again), ("programs in the opposite order", got.reversed))
        for way, other in ways:
            if other is None:
                raise UsageError("the case was computed once; next: draw it with repeated=True")
            for sample, (one, two) in enumerate(zip(got.once, other, strict=True)):
                if not torch.equal(one, two):
                    cause = "the order in which sums are added is not fixed" if way != "the same call" else ""
                    raise Violation("a kernel gives other bits the second time", got=number(two), wanted=number(one),
                                    where=f"{_where(name, sample, spec)}, {way}",
                                    cause=cause or "a call changes what the next one computes")  # fmt: skip


def assert_memory_kept(execution: Execution) -> None:
    """A kernel writes to nothing but what it allocated, and neither reads beside its inputs nor what nobody wrote.

    Both lie in memory that is NaN, so whatever is read there shows in a norm.
    """
    spec = spec_of(execution)
    for name, got in computed(execution):
        if got.touched:
            raise Violation("a kernel writes to memory that is not its own", got=", ".join(got.touched),
                            wanted="only what it allocated", where=_where(name, None, spec),
                            cause=f"it writes to {', '.join(got.touched)}")  # fmt: skip
        if bool(got.once.isnan().any()):
            sample = int(got.once.isnan().nonzero()[0])
            raise Violation("a kernel reads memory that is not its own", got="nan", wanted="a number",
                            where=_where(name, sample, spec),
                            cause=partial(norm_kernels.of_unread, math.nan))  # fmt: skip


def assert_spoiled(execution: Execution) -> None:
    """The sample with a NaN has norm NaN, that with an infinity has no finite one: neither passes unclipped."""
    spec, spoiled = spec_of(execution), _spoiled(execution)
    if spoiled is None:
        raise UsageError("no sample is spoiled; next: draw spoil='nan' or 'inf'")
    for name, got in computed(execution):
        _require_samples(name, got.once, spec.samples)
        value = float(got.once[spoiled])
        if math.isfinite(value) or (spec.spoil == "nan" and not math.isnan(value)):
            wanted = "nan" if spec.spoil == "nan" else "nan or inf"
            raise Violation("a sample without a finite norm seems to have one", got=repr(value), wanted=wanted,
                            where=_where(name, spoiled, spec),
                            cause=f"a number takes the place of {spec.spoil}: the sample passes unseen")  # fmt: skip


def _spoiled(execution: Execution) -> int | None:
    place = kernel_data.spoiled(spec_of(execution), case_of(execution).seed)
    return None if place is None else place[1]


def _require_samples(name: str, got: Tensor, wanted: int) -> None:
    if len(got) != wanted:
        raise Violation("a kernel gives another number of norms", got=str(len(got)), wanted=str(wanted), where=name)


def _where(name: str, sample: int | None, spec: KernelSpec) -> str:
    shape = f"T = {spec.positions}, d = {spec.inputs}, p = {spec.outputs}"
    return f"kernel {name!r}, {shape}" + ("" if sample is None else f", sample {sample}")
