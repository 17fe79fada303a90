"""Spaces of cases that several laws are about, by name; others are derived from them (``but``, ``without``)."""

from __future__ import annotations

from typing import Final

from fsdpcheck.case import Trait
from fsdpcheck.case.traits import not_in_low_precision
from fsdpcheck.strategies.space import CaseSpace, Family

HIDING: Final[tuple[Trait, ...]] = ("momentum", "weight-decay", "adam", "adamw", "matrix-optimizer", "row-optimizer")
"""Optimizers whose update does not show its gradient."""
_NOT_IN_LOW_PRECISION: frozenset[Trait] = not_in_low_precision(own=False) | {"per-layer-clipping", "real"}

PLAIN: Final = CaseSpace(clipping=("none",))
"""Ordinary training, no clipping of any kind."""
PLAIN_ANY_SUM: Final = PLAIN.but(adjusted=("any sum",))
"""``PLAIN``, and cases whose sums W does not divide."""
GLOBAL_NORM: Final = PLAIN.but(global_norm=True)
"""Ordinary training with ``max_grad_norm``."""
REAL: Final = PLAIN.but(numbers="real")
"""Ordinary training on real numbers with the true functions."""
PRIVATE_UNCLIPPED: Final = CaseSpace(clipping=("unclipped",))
"""Per-sample clipping with C above every norm."""
PRIVATE_EXACT: Final = CaseSpace(clipping=("exact",))
"""Per-sample clipping with norms that are powers of two or stand at the threshold."""
PRIVATE_PROBE: Final = CaseSpace(clipping=("probe",))
"""Per-sample clipping with any C; the instrument reads the coefficients."""
PRIVATE: Final = CaseSpace(clipping=("unclipped", "exact", "probe"))
"""Per-sample clipping of any family."""
REAL_PRIVATE: Final = PRIVATE_PROBE.but(numbers="real")
"""Per-sample clipping on real numbers with the true functions, any C."""
EQUAL_BITS: Final = CaseSpace(
    clipping=(Family("none", ("plain",)), Family("unclipped", ("private",)), Family("exact", ("exact-factors",)))
)
"""Plain and private steps, of each family in which the implementation promises the single device's bits."""
COUNTABLE: Final = PRIVATE_PROBE.but(
    adjusted=("one step", "on real numbers"), user_models="known layers"
).without("surrogates", "layer-norm", "float32", "per-layer-clipping", "routed-private", "reused-private",
          "dropped-private")  # fmt: skip
"""Float64, on real numbers, of functions whose roundings can be counted: no normalisation, softmax or GELU.

Private, with any C. In one step: in each further one, norms are formed as in the first.
"""
LOW_PRECISION: Final = PLAIN.but(
    compute="bfloat16", tiny_only=True, left_out=_NOT_IN_LOW_PRECISION, user_models="never"
)  # fmt: skip
"""Float32 cases whose model computes in bfloat16."""
