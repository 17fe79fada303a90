"""Conditions of verdicts: what every account of a session says with them, on paper, as JSON and in pytest."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Final

CONDITIONS: Final = {
    "privacy.*": "judged for given lists of records, one a rank: samplers that partition are judged conditional on the"
    " lists they drew, and no amplification by sampling is claimed of them"
}
"""Pattern of laws' names -> how their verdicts are to be read."""


def conditions(judged: Iterable[str]) -> dict[str, str]:
    """Those of CONDITIONS under which a law of these names stands; ``judged``: laws of which cases were judged."""
    names = set(judged)
    return {pattern: text for pattern, text in CONDITIONS.items() if any(fnmatch(name, pattern) for name in names)}


def sentences(judged: Iterable[str]) -> list[str]:
    """``conditions`` in words, one line each."""
    return [f"{pattern} is {text}" for pattern, text in conditions(judged).items()]
