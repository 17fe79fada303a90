"""Order: which laws an implementation is asked first. Imports no torch."""

from __future__ import annotations

from typing import Final

LEADERS: Final = ("training.plain", "collectives.plain")
"""Laws that each adapter is asked first: they need nothing of it but what every law on a model needs."""


def rank(law: str) -> int:
    """A key to sort by: the leaders in their order, then all others alike."""
    return LEADERS.index(law) if law in LEADERS else len(LEADERS)
