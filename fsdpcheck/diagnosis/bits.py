"""Numbers rounded to fewer bits, and the types that have so many."""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = {3: "float8_e5m2", 4: "float8_e4m3", 8: "bfloat16", 11: "float16 and TF32", 24: "float32"}
"""Bits of a significand, the hidden one included -> the types that have them."""


def rounded(value: Tensor, bits: int) -> Tensor:
    """``value`` rounded to nearest, ties to even, with ``bits`` of significand and no bound on exponents."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


def words(bits: int) -> str:
    """ "rounded to 8 bits, the precision of bfloat16"."""
    return f"rounded to {bits} bits, the precision of {TYPES[bits]}"
