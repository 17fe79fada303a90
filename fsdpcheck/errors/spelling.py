"""Spelling: the nearest known name to one that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(word: str, known: Iterable[str]) -> str:
    """The words " Did you mean 'frozen'?" for "frosen", or "" when no known name is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def hint_of_glob(glob: str, known: Iterable[str]) -> str:
    """As ``hint``, for a pattern of dotted names: " Did you mean 'norms.*'?" for "nomrs.*", and for "norms" too."""
    names = list(known)
    chapters = list(dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names))
    whole = f"{glob}.*"
    return f" Did you mean {whole!r}?" if whole in chapters else hint(glob, [*names, *chapters])
