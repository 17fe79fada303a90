"""Hypothesis strategies of cases. A law says which cases it is about by a space, ``cases_of`` draws them.

For ``@given`` tests of one's own: ``worlds``, ``meshes``, ``shapes``, ``layouts``, ``cases``, and ``example`` and
``case_of`` for the token of a finding. All of them shrink towards one rank and the smallest sizes.
"""

from __future__ import annotations

from fsdpcheck.strategies.public_strategies import case_of, cases, example, layouts, meshes, shapes, worlds
from fsdpcheck.strategies.space import BuiltSpace, CaseSpace, Family, KernelSpace, SamplerSpace, Space
from fsdpcheck.strategies.space_drawing import WORLD_SIZES, cases_of
from fsdpcheck.strategies.spaces import (
    COUNTABLE,
    EQUAL_BITS,
    GLOBAL_NORM,
    HIDING,
    LOW_PRECISION,
    PLAIN,
    PLAIN_ANY_SUM,
    PRIVATE,
    PRIVATE_EXACT,
    PRIVATE_PROBE,
    PRIVATE_UNCLIPPED,
    REAL,
    REAL_PRIVATE,
)

__all__ = [
    "COUNTABLE", "EQUAL_BITS", "GLOBAL_NORM", "HIDING", "LOW_PRECISION", "PLAIN", "PLAIN_ANY_SUM", "PRIVATE",
    "PRIVATE_EXACT", "PRIVATE_PROBE", "PRIVATE_UNCLIPPED", "REAL", "REAL_PRIVATE", "WORLD_SIZES", "BuiltSpace",
    "CaseSpace", "Family", "KernelSpace", "SamplerSpace", "Space", "case_of", "cases", "cases_of", "example", "layouts",
    "meshes", "shapes", "worlds",
]  # fmt: skip
