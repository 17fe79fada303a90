"""Colours of a terminal, and the rule when there are none: not a terminal, NO_COLOR, or TERM=dumb."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

_CODES = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}

Paint = Callable[[str, str], str]
"""(text, colour) -> text."""


def uncoloured(text: str, colour: str) -> str:
    """The Paint of a text that is no terminal's."""
    return text


def painter(stream: TextIO) -> Paint:
    """How to colour text that goes to ``stream`` (see no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return uncoloured if plain else _coloured


def _coloured(text: str, colour: str) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"
