"""Profiles: how many cases of a law are drawn, and for which numbers of ranks."""

from __future__ import annotations

from typing import Final

PROFILES: Final[dict[str, int]] = {"quick": 10, "ci": 60, "nightly": 300}
"""Profile -> the most cases judged of one law and one adapter. Those of "quick" are also the least of any verdict."""


WORLD_SIZES: Final[dict[str, tuple[int, ...]]] = {
    "quick": (1, 2, 3, 4, 5),
    "ci": (1, 2, 3, 4, 5) * 4 + (6, 7, 8, 13),
    "nightly": (1, 2, 3, 4, 5, 6, 7, 8, 13),
}
"""Profile -> numbers of ranks that cases are drawn from unless some are asked for; one that stands four times is drawn
four times as often. 7 and 13 are where multiplying by the rounded 1/W is inexact in float32."""
