"""Columns that fit a terminal: cells are wrapped, the widest columns first."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

_GAP: Final = "  "
_BEGINS: Final = re.compile(r"\s|[-*] |(Not seen|Source): ")
_LEAST: Final = 12
"""No column is made narrower than this, whatever the terminal."""


def width_of_terminal() -> int:
    """Characters in a line: COLUMNS where it says so, else those of the terminal that stdout is.

    0 where stdout is none, so that a row stays a line for grep.
    """
    asked = os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if asked or sys.stdout.isatty() else 0


def fitted(rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows in columns, none wider than ``width``; 0 is no limit."""
    natural = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths = _shared(natural, width - len(_GAP) * (len(natural) - 1)) if width else natural
    return "\n".join(line for row in rows for line in _wrapped(row, widths))


def hanging(label: str, text: str, width: int) -> str:
    """``text`` behind ``label``, its further lines below itself; no name is cut at a hyphen."""
    if not width:
        return f"{label}{text}"
    room, indent = max(width, len(label) + _LEAST), " " * len(label)
    return "\n".join(textwrap.wrap(f"{label}{text}", room, subsequent_indent=indent, break_on_hyphens=False))


def filled(text: str, width: int) -> str:
    """``text`` with its paragraphs filled anew; 0 leaves it as it is.

    A line that begins with a space, a dash or a name of what follows ("Source: ...") stays the first of its own.
    """
    if not width:
        return text
    begun: list[str] = []
    for line in text.splitlines():
        goes_on = begun and begun[-1] and line and not _BEGINS.match(line)
        begun[-1:] = [f"{begun[-1]} {line}"] if goes_on else [*begun[-1:], line]
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in begun)


def _shared(natural: list[int], room: int) -> list[int]:
    """Widths of columns that fit into ``room``: the widest give way, all of them alike."""
    cap = max(natural)
    while cap > _LEAST and sum(min(each, cap) for each in natural) > room:
        cap -= 1
    return [min(each, cap) for each in natural]


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    lines = zip_longest(*cells, fillvalue="")
    return [_GAP.join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip() for line in lines]
