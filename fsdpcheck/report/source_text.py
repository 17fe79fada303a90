"""Source text under file:line: what stands where a report says that something happened."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from typing import Final

from fsdpcheck.errors.excerpt import visible

_PLACE: Final = re.compile(r"\bat ((?:[^\s:]|(?<=\S) (?=\S))*?[^\s:/]+\.py):(\d+)$")
"""The end of a line that says where: "..., at train.py:12"."""
_MOST: Final = 100
"""Characters of a line of source that are shown."""


def with_source(text: str) -> str:
    """``text`` with a line of source below each line that ends in a place, the first time it is named.

    A place whose file is not here, or has no such line, has nothing below it.
    """
    return "\n".join(_lines(text))


def _lines(text: str) -> Iterator[str]:
    shown: set[tuple[str, str]] = set()
    for line in text.splitlines():
        yield line
        found = _PLACE.search(line)
        if found is None or found.groups() in shown:
            continue
        shown.add((found[1], found[2]))
        if source := linecache.getline(found[1], int(found[2])).strip():
            indent = len(line) - len(line.lstrip()) + 2
            cut = source if len(source) <= _MOST else f"{source[:_MOST]}..."
            yield f"{' ' * indent}> {visible(cut)}"
