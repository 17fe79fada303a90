"""Columns that fit a terminal: cells are wrapped, the widest columns first."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

_GAP: Final = "  "
_LEAST: Final = 12
"""No column is made narrower than this, whatever the terminal."""


def width_of_terminal() -> int:
    """Characters in a line of the terminal that stdout is; 0 where it is none, so that a row stays a line for grep."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def fitted(rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows in columns, none wider than ``width``; 0 is no limit."""
    natural = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths = _shared(natural, width - len(_GAP) * (len(natural) - 1)) if width else natural
    return "\n".join(line for row in rows for line in _wrapped(row, widths))


def hanging(label: str, text: str, width: int) -> str:
    """``text`` behind ``label``, its further lines below itself."""
    if not width:
        return f"{label}{text}"
    return "\n".join(
        textwrap.wrap(f"{label}{text}", max(width, len(label) + _LEAST), subsequent_indent=" " * len(label))
    )


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
