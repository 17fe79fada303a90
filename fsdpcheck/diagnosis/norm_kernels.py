"""Causes of a squared norm that a kernel computes wrongly from one sample's activations and backprops.

Legend: T positions, d input and p output features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.case import KernelCase, KernelSpec
from fsdpcheck.diagnosis import bits
from fsdpcheck.findings.cause import EXACT, WEAK, Cause, Causes
from fsdpcheck.program import kernel_data

_FLOAT32: Final = 24
_ROUNDED: Final = 2.0**-50
"""What of a norm the float64 of ``_of_beginnings`` may be off by."""


def of_unread(got: float) -> list[Cause]:
    """Whether what nobody wrote was read: a kernel's memory is NaN."""
    return [Cause("unread", "it reads beside its inputs, or what nobody has written")] if math.isnan(got) else []


def of_squared_norm(case: KernelCase, sample: int, got: float, right: Fraction, bound: Fraction) -> Causes:
    """Causes of ``got`` in place of ``right``. ``bound``: by how much a right kernel may be off it; 0 if by nothing."""
    if unread := of_unread(got):
        return unread
    spec, found = case.kernel, []
    if got == float(kernel_data.by_position(spec, case.seed)[sample]):
        found.append(Cause("positions apart", "each position is squared by itself: terms of two positions are missing"))
    if bound:  # small whole numbers have few bits whatever a kernel does
        found += of_few_bits(got, float(right))
    found += _of_beginnings(spec, case.seed, sample, got, float(bound))
    if not found and right and math.isfinite(got):
        ratio = f"{float(Fraction(got) / right):.6g}"
        found.append(Cause(f"ratio {ratio}", f"it is {ratio} times the right one"))
    return found


def of_few_bits(got: float, right: float) -> Iterator[Cause]:
    """Whether a norm is the nearest one in a type with fewer bits than float32."""
    for count in (count for count in bits.TYPES if count < _FLOAT32):
        own, near = (bits.rounded(torch.tensor(value, dtype=torch.float64), count) for value in (got, right))
        if got == float(own) == float(near):
            yield Cause(f"{count} bits", f"the norm is {bits.words(count)}")
            return


def _of_beginnings(spec: KernelSpec, seed: int, sample: int, got: float, bound: float) -> Iterator[Cause]:
    """Whether the last positions or features do not count, as where the tile at the end is never computed."""
    a_Td, g_Tp = (value[sample].double() for value in kernel_data.tensors(spec, seed))
    terms_Tpd = g_Tp.unsqueeze(2) * a_Td.unsqueeze(1)
    squares_pd = terms_Tpd.sum(0).square()
    beginnings = {
        "positions": terms_Tpd.cumsum(0).square().sum((1, 2)),
        "output features": squares_pd.sum(1).cumsum(0),
        "input features": squares_pd.sum(0).cumsum(0),
    }
    for noun, squared in beginnings.items():
        kept = _fits(squared, got, bound)
        if kept:
            text = f"it is the norm of the first {kept} of {len(squared)} {noun}: the tile at the end is left out"
            yield Cause(f"first {noun}", text, EXACT if got else WEAK)  # 0 is that of nothing, whatever is left out


def _fits(squared: Tensor, got: float, bound: float) -> int:
    """How many count, if ``got`` is the norm of just so many and not of all; else 0."""
    room = bound + squared.abs() * _ROUNDED
    near = ((squared - got).abs() <= room).nonzero().flatten()
    return int(near[-1]) + 1 if len(near) and int(near[-1]) + 1 < len(squared) else 0
