"""Choice: one of a few values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from hypothesis import strategies as st

_T = TypeVar("_T")
_KEPT = 4096


def among(values: Sequence[_T]) -> st.SearchStrategy[_T]:
    """As ``st.sampled_from``, made once for equal values: to make it takes longer than to draw from it."""
    return _among(tuple(values), tuple(map(type, values)))


@lru_cache(maxsize=_KEPT)
def _among(values: tuple[_T, ...], types: tuple[type, ...]) -> st.SearchStrategy[_T]:
    """``types`` tells 1 from True, which are equal."""
    return st.sampled_from(values)
