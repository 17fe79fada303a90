"""Which standard of equality a case is judged by: chosen by the case and by what the implementation declares."""

from __future__ import annotations

from typing import Literal

from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import Case, KernelCase, SamplerCase

Tier = Literal["exact", "low precision", "any C", "replay", "lists", "bounded"]
"""exact: every sum is exact, so every bit must agree. low precision: the model computes in bfloat16 or TF32, on numbers
so small that nothing rounds there either, so every bit must agree with the answer in float64. any C: squared norms are
exact and factors an elementwise map of them, but sums of weighted gradients round, within a proven bound; the probe
reads the factors themselves, in low precision up to two roundings. replay: real numbers and true non-linearities; local
gradients are replayed in the same shapes and their sum may round by a theorem.
lists: what a sampler dealt out, compared entry by entry, or counted, where only its frequency is promised, and held
against exact binomial tails. bounded: a kernel on real numbers, within a proven bound.
Source of bounds: Higham, Accuracy and Stability of Numerical Algorithms, chapters 2-4."""


def every_bit(tier: Tier) -> bool:
    """Whether gradients and parameters must agree in every bit, whatever clips them."""
    return tier in ("exact", "low precision")


def of(case: Case, rule: FactorRule) -> Tier:
    """The tier ``case`` is judged in, for an implementation whose clip factors follow ``rule``."""
    if isinstance(case, SamplerCase):
        return "lists"
    if isinstance(case, KernelCase):
        return "exact" if case.kernel.numbers == "grid" else "bounded"
    if case.arithmetic.numbers == "real":
        return "replay"
    if case.arithmetic.compute != "dtype" and case.step.clipping != "probe":
        return "low precision"
    if case.step.clipping == "probe" or (case.step.clipping == "exact" and rule.nested):
        return "any C"
    return "exact"
