"""Spelling: the nearest known name to one that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(word: str, known: Iterable[str]) -> str:
    """The words " Did you mean 'frozen'?" for "frosen", or "" when no known name is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
